"""What accelerators can do at most, by their makers' data sheets: dense bf16 products and memory bandwidth."""

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Upper bounds of a device."""

    bf16_tflops: float
    """Dense, 10^12 FLOPs a second."""
    bandwidth_gbs: float
    """10^9 bytes a second."""


PEAKS: tuple[tuple[str, Peak], ...] = (
    ("B200", Peak(2250, 8000)),
    ("H200", Peak(989, 4800)),
    ("H100 PCIe", Peak(756, 2000)),
    ("H100 NVL", Peak(835, 3900)),
    ("H100", Peak(989, 3350)),
    ("A100-SXM4-40GB", Peak(312, 1555)),
    ("A100-PCIE-40GB", Peak(312, 1555)),
    ("A100", Peak(312, 2039)),
    ("L40S", Peak(362, 864)),
    ("L4", Peak(121, 300)),
    ("A10", Peak(125, 600)),
    ("4090", Peak(165, 1008)),
    ("3090", Peak(71, 936)),
    ("MI300X", Peak(1307, 5300)),
)
"""Part of the device's name -> peak; the first that fits counts."""


def peak_of(device_name: str) -> Peak | None:
    """The peak of a device by the name that PyTorch gives it; None for one that is not in the table."""
    for name, peak in PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name):  # L4 is not in L40S
            return peak
    return None
