"""Saving and loading a whole job: model and optimizer once, the compressor's state once per rank.

A directory holds ``checkpoint.pt`` (rank 0: model, optimizer, extra) and one ``compressor-<token>-<rank>-of-<size>.pt``
per rank. The token ties them together: the ranks' files are complete before ``checkpoint.pt`` names them, so that a
job that dies while saving leaves the previous checkpoint intact.
"""

from dgc.torch.checkpoint.files import MAIN_FILE
from dgc.torch.checkpoint.load import load_checkpoint
from dgc.torch.checkpoint.rank_state import RankState
from dgc.torch.checkpoint.save import save_checkpoint

__all__ = ["MAIN_FILE", "RankState", "load_checkpoint", "save_checkpoint"]
