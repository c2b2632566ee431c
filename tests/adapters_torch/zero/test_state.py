"""Groups and checkpoints of the sharded optimizer: on real ranks, and what needs none."""

from pathlib import Path

import pytest
from rank_jobs import SIZES, each_case

torch = pytest.importorskip("torch")

from dgc.torch.zero.state import full_entries, local_dict  # noqa: E402

WORKER = Path(__file__).parent / "workers" / "state_cases.py"


test_groups_and_checkpoints = each_case(WORKER, SIZES)


@pytest.mark.mpi
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_checkpoints_through_a_file_and_another_number_of_ranks(ranks, before, after, tmp_path):
    ranks.run(WORKER, before, "save", tmp_path)
    assert ranks.run(WORKER, after, "continue", tmp_path).reports == [["adam", "adamw", "sgd"]] * after


def test_state_is_cut_and_put_together_without_sharing():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
    plain = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 7.0}], lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    plain.step()
    whole = plain.state_dict()
    part = local_dict(whole, [[1], [2]])
    assert [g["params"] for g in part["param_groups"]] == [[0], [1]]
    assert [g["lr"] for g in part["param_groups"]] == [0.1, 7.0]
    assert part["state"][0]["exp_avg"].shape == (4,)
    part["state"][0]["exp_avg"].fill_(9)
    assert not (whole["state"][1]["exp_avg"] == 9).any()
    back = full_entries(part, [[1], [2]])
    assert sorted(back) == [1, 2]
    assert back[1]["exp_avg"].data_ptr() != part["state"][0]["exp_avg"].data_ptr()
