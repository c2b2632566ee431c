"""The mathematics of gradient compression: it turns arrays into messages. It knows no framework, MPI or Horovod."""
