"""Horovod, or a clear error."""


def import_horovod():
    import horovod.torch as hvd

    return hvd
