#!/bin/sh
# What mpirun calls in place of ssh: agent.sh HOST COMMAND. How a host is entered stands in a file of its name.
host=$1
shift
. "$DGC_LAB/$host.enter"
