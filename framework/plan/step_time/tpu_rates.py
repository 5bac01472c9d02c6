"""Speeds of a chip, and the assumptions used when a speed is neither published nor measured.

The published figures are in framework/devices/accelerators.toml, each with its source. The constants below calibrate
the TPU compiler's cost model. They come from comparing its `estimated_cycles` with libtpu's static profile of the
scheduled bundles (LIBTPU_INIT_ARGS=--xla_jf_dump_static_llo_profile_to=DIR), on v5e, by operation:

    operation                                estimate, cycles    profile      HBM at its peak
    matmul 4096^3, bfloat16                  1,083,068           1,080,291    (MXU: 1,048,576)
    bfloat16 add, 4096^2                     573,600             194,125      184,300
    rotary: multiply, subtract, convert      52,084              6,019        in VMEM
    rotary: concatenate (pad, maximum)       26,106              4,877        3,848

So the estimate is accurate for matrix products and 3 to 9 times too high for thin elementwise work.
"""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.framework.devices.accelerators import AcceleratorSpec

# Thin operations take this factor times their HBM bytes at peak bandwidth, or their VMEM bytes at the rate below,
# whichever is longer, but never more than the compiler's estimate.
ELEMENTWISE_OVER_HBM = 1.25
VMEM_BYTES_PER_CYCLE = 1400
# Attention kernels have no compiler estimate. They are assumed to reach this fraction of the peak, reduced in
# proportion if the head size is below the MXU's 128 rows. A causal mask leaves half of the FLOPs of an unmasked kernel.
ATTENTION_EFFICIENCY = 0.5
ATTENTION_FULL_HEAD = 128
CAUSAL_SHARE = 0.5
# Transfers of stacks are assumed to reach this fraction of PCIe's published rate: 12 GB/s per chip each way on v5e.
PCIE_EFFICIENCY = 0.75


class TpuRates(NamedTuple):
    """The speeds of one jax device, per second.

    Attributes:
        name: name of the accelerator.
        flops: FLOPs of bfloat16 matrix products.
        flops_per_cycle: FLOPs of bfloat16 matrix products per cycle of the compiler's cost model, not per second.
        hbm: bytes to and from device memory.
        all_links: bytes received from other chips over all links of a chip.
        two_links: bytes received over two links, the number that the corner of a slice without wrap-around has.
        pcie: bytes in each direction between device and host, both at the same time.
    """

    name: str
    flops: float
    flops_per_cycle: float
    hbm: float
    all_links: float
    two_links: float
    pcie: float

    @property
    def cycles(self) -> float:
        """Cycles of the compiler's cost model per second."""
        return self.flops / self.flops_per_cycle

    @staticmethod
    def look_up(spec: AcceleratorSpec) -> TpuRates:
        """Return the rates of an accelerator.

        Raises:
            ValueError: it is not a TPU, or its figures are not published.
        """
        figures = (
            spec.peak_bf16_flops,
            spec.flops_per_cycle,
            spec.hbm_bytes_per_second,
            spec.ici_bytes_per_second,
            spec.ici_link_bytes_per_second,
            spec.pcie_bytes_per_second,
        )
        published = [float(figure) for figure in figures if figure is not None]
        if spec.platform != "tpu" or len(published) < len(figures):
            raise ValueError(f"{spec.name}: step time is counted only for TPUs whose rates are known")
        flops, flops_per_cycle, hbm, all_links, link, pcie = published
        return TpuRates(
            name=spec.name,
            flops=flops,
            flops_per_cycle=flops_per_cycle,
            hbm=hbm,
            all_links=all_links,
            two_links=2 * link,
            pcie=PCIE_EFFICIENCY * pcie,
        )

    def attention_flops(self, head_size: int) -> float:
        """Return the FLOP/s that an attention kernel is assumed to reach."""
        # A head smaller than the MXU leaves some of its rows idle.
        used_rows = min(1.0, head_size / ATTENTION_FULL_HEAD)
        return self.flops * ATTENTION_EFFICIENCY * used_rows
