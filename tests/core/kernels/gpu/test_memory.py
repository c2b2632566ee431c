"""Memory of the device backend: arrays that grow, slots that are reused once they have been read, copies that wait."""

import numpy as np
import pytest

from dgc.core.kernels.gpu.memory import DeviceMemory, Tables, Workspace


class Runtime:
    """Runs what was enqueued when somebody waits, as late as a device may."""

    def __init__(self):
        self.queue, self.slots = [], []

    def empty(self, n, dtype):
        return np.full(n, 7, dtype)

    def zeros(self, n, dtype):
        return np.zeros(n, dtype)

    def host_array(self, n, dtype):
        self.slots.append(np.zeros(n, dtype))
        return self.slots[-1]

    def upload(self, device, host):
        assert (device.dtype, device.size) == (host.dtype, host.size)
        self.queue.append((device, host))

    download = copy = upload

    def fill(self, array, value):
        self.queue.append((array, value))

    def record(self):
        return len(self.queue)

    def synchronize(self, event):
        for target, source in self.queue[:event]:
            target[...] = source
        del self.queue[:event]


@pytest.mark.parametrize("n", [0, 1, 64, 65, 1000])
def test_an_array_stays_while_it_is_large_enough(n):
    workspace = Workspace(Runtime())
    first = workspace.get("a", np.float32, n)
    assert first.size == n
    again = workspace.get("a", "float32", n // 2)
    assert again.base is first.base
    assert workspace.get("a", np.float32, 2 * n + 100).base is not first.base


def test_arrays_differ_by_name_and_type_and_zeros_are_zeros_also_when_grown():
    workspace = Workspace(Runtime())
    kept = [workspace.get(*key, 4).base for key in (("a", np.float32), ("a", np.int32), ("b", np.float32))]
    assert len({id(array) for array in kept}) == 3
    for n in (4, 4000):
        assert not workspace.get("z", np.int64, n, zeros=True).any()


ARRAYS = [np.arange(3, dtype=np.int64), np.zeros(0, np.float64), np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2]]


def test_tables_arrive_as_they_were_sent_and_aligned():
    runtime = Runtime()
    parts = Tables(runtime).send(*ARRAYS)
    assert len(runtime.queue) == 1
    runtime.synchronize(runtime.record())
    base = parts[0].base.ctypes.data
    for part, array in zip(parts, ARRAYS, strict=True):
        assert part.tobytes() == array.tobytes()
        assert (part.ctypes.data - base) % 16 == 0


def test_a_slot_is_not_written_before_its_copy_has_run():
    runtime = Runtime()
    tables = Tables(runtime)
    sent = [tables.send(np.array([i])) for i in range(3)]
    runtime.synchronize(runtime.record())
    assert [int(parts[0].view(np.int64)[0]) for parts in sent] == [0, 1, 2]
    assert len(runtime.slots) == 3


def test_slots_are_reused_once_everything_has_arrived():
    runtime = Runtime()
    tables = Tables(runtime)
    for _ in range(5):
        for i in range(2):
            tables.send(np.array([i]))
        tables.all_arrived()
    assert len(runtime.slots) == 2
    tables.send(np.zeros(10_000, np.uint8))
    # The larger one took the place of one of the two.
    assert len(runtime.slots) == 3
    assert len(tables._free) == len(tables._used) == 1


def memory():
    return DeviceMemory(Runtime(), lambda arrays: [float(np.dot(a, a)) for a in arrays])


@pytest.mark.parametrize("n", [0, 1, 5])
def test_what_goes_in_comes_out(n):
    device = memory()
    array = device.zeros(n, np.float32)
    device.copy_in(array, np.arange(n))
    assert device.to_host(array).tolist() == list(range(n))
    device.copy_in(array, np.full(n, 2))
    other = device.zeros(n, np.float32)
    device.copy(other, array)
    assert device.to_host(other).tolist() == [2] * n
    assert device.sum_of_squares(other) == 4 * n
    assert device.host_array(n, np.uint8).shape == (n,)


def test_what_was_copied_in_may_be_changed_at_once():
    device, values = memory(), np.ones(3, np.float32)
    array = device.zeros(3, np.float32)
    device.copy_in(array, values)
    values[:] = 5
    assert device.to_host(array).tolist() == [1, 1, 1]


@pytest.mark.parametrize("values", [np.zeros(2), np.zeros((1, 3)), np.zeros(())])
def test_another_number_of_values_is_refused(values):
    device = memory()
    with pytest.raises(ValueError, match="values for an array of 3 elements"):
        device.copy_in(device.zeros(3, np.float32), values)
