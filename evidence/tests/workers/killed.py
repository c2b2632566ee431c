"""A rank of the evidence that is killed outright in the middle of its third epoch."""

from __future__ import annotations

import os
import signal
import sys

from evidence import rank
from evidence.applications.language import Language

if __name__ == "__main__":
    batches = Language.batches

    def until_the_third_epoch(self, epoch, own, size):
        for step, batch in enumerate(batches(self, epoch, own, size)):
            if (epoch, step, own) == (2, 5, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    Language.batches = until_the_third_epoch
    sys.exit(rank.main())
