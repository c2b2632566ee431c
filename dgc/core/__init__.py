"""The mathematics of gradient compression: arrays in, messages out. Knows no framework, no MPI, no Horovod."""
