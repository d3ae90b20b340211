"""Copies in packets: all bytes arrive, one packet in flight, no packet across two chunks."""

import pytest
import torch

from raymoe.device.cuda_api import PacketCopier
from raymoe.errors import ConfigError
from tests.unit.device.fake_cuda import FakeCuda


@pytest.mark.parametrize("num_bytes", [0, 1, 16, 17, 1000])
def test_all_bytes_arrive_one_packet_at_a_time(num_bytes: int) -> None:
    api = FakeCuda()
    copier = PacketCopier(api, api.new_stream(), packet_bytes=16, chunk_bytes=1 << 30)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copier.copy(target, source)
    assert torch.equal(target, source)
    num_packets = -(-num_bytes // 16)
    expected = [("record", 0)] if num_packets else []
    for packet in range(1, num_packets):
        expected += [("wait", packet - 1), ("record", packet)]
    assert api.log == expected


def test_the_next_copy_waits_for_the_last_packet_of_the_one_before() -> None:
    api = FakeCuda()
    copier = PacketCopier(api, api.new_stream(), packet_bytes=16, chunk_bytes=1 << 30)
    for _ in range(2):
        copier.copy(torch.zeros(8), torch.ones(8))
    assert api.log == [
        ("record", 0), ("wait", 0), ("record", 1), ("wait", 1), ("record", 2), ("wait", 2),
        ("record", 3),
    ]  # fmt: skip


def test_no_packet_crosses_a_multiple_of_the_chunk_in_the_source() -> None:
    memory = torch.arange(256, dtype=torch.int64).to(torch.uint8).repeat(4)
    begin = -memory.data_ptr() % 64 + 40  # 24 bytes before a multiple of 64
    source = memory[begin : begin + 24 + 64 + 10]
    api = FakeCuda()
    target = torch.zeros_like(source)
    PacketCopier(api, api.new_stream(), packet_bytes=40, chunk_bytes=64).copy(target, source)
    assert torch.equal(target, source)
    num_packets = sum(what == "record" for what, _ in api.log)
    assert num_packets == 1 + 2 + 1  # 24 | 40 + 24 | 10


def test_types_may_differ_but_not_sizes_or_strides() -> None:
    api = FakeCuda()
    copier = PacketCopier(api, api.new_stream(), packet_bytes=16)
    target = torch.zeros(2, 8, dtype=torch.uint8)
    copier.copy(target, torch.ones(4))
    assert torch.equal(target.view(-1).view(torch.float32), torch.ones(4))
    with pytest.raises(ConfigError, match="cannot copy 20 bytes to 16 bytes"):
        copier.copy(target, torch.ones(5))
    with pytest.raises(ConfigError, match="in one piece"):
        copier.copy(target, torch.ones(8)[::2])
    with pytest.raises(ConfigError, match="too small"):
        PacketCopier(api, api.new_stream(), packet_bytes=0)
