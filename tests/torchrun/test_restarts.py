"""torchrun's way to go on when a rank dies: it starts the ranks again, which load the latest checkpoint."""

from pathlib import Path

import numpy as np
import pytest
from launch_tools import run_mpi

WORKER = Path(__file__).parent / "workers" / "restarts.py"


def run(ranks, folder, steps, dies_after=-1, restarts=0):
    # torchrun's --max-restarts; in the store that it shares with its ranks Gloo finds the addresses of dead ones.
    environment = {"PET_MAX_RESTARTS": str(restarts), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return run_mpi(ranks, WORKER, folder, steps, dies_after, launcher="torchrun", env=environment, check=False)


def require_end(result, well):
    assert not result.timed_out, result.explain()
    assert (result.returncode == 0) == well, result.explain()


@pytest.mark.mpi
@pytest.mark.matrix
@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_other_numbers_of_ranks_go_on_with_the_mean_residual(tmp_path):
    results = [run(2, tmp_path, 9, dies_after=6, restarts=3), run(3, tmp_path, 14, dies_after=10), run(2, tmp_path, 13)]
    for result, well in zip(results, (True, False, True), strict=True):
        require_end(result, well)
    assert (tmp_path / "died-2").exists()
    for reports in results[0].reports:
        assert [r["loaded"] for r in reports if "loaded" in r] == [6]
        assert reports[-1]["digest"] == reports[-1]["straight"]
    for before, after, loaded in zip(results, results[1:], (8, 10), strict=False):
        saved = [r for r in before.reports[0] if "saved" in r][-1]
        for reports in after.reports:
            assert reports[0]["loaded"] == saved["saved"] == loaded
            assert np.linalg.norm(saved["residual"]) > 0
            np.testing.assert_allclose(reports[0]["residual"], saved["residual"], rtol=1e-5, atol=1e-9)
    assert len({reports[-1]["digest"] for reports in results[-1].reports}) == 1
