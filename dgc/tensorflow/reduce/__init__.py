"""One step's gradients reduced: compressed, or by Horovod's dense allreduce."""
