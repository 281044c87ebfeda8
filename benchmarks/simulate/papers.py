"""The published rows that the simulator is held against, as they are printed.

NestPipe: arXiv 2604.06956, its scaling table and the times of 1,536 workers. TurboGR: arXiv
2605.13433. Touch this only to correct a transcription.
"""

from dataclasses import dataclass

WORKERS = (128, 256, 512, 1024, 1536)
CALIBRATION = (128, 256)
SAMPLES = 512  # of a worker and step, by the paper's throughputs


@dataclass(frozen=True)
class ScalingRow:
    """Throughput in 1e5 samples a second and efficiency over 128 workers, by workers."""

    throughput: dict[int, float]
    efficiency: dict[int, float]


def _row(throughput: tuple[float, ...], efficiency: tuple[float, ...]) -> ScalingRow:
    return ScalingRow(
        dict(zip(WORKERS, throughput, strict=True)),
        dict(zip(WORKERS[1:], efficiency, strict=True)),
    )


NESTPIPE = {
    "TorchRec": _row((0.26, 0.47, 0.68, 1.09, 1.36), (0.9123, 0.6664, 0.5336, 0.4434)),
    "2D-SP": _row((0.27, 0.49, 0.75, 1.22, 1.60), (0.9136, 0.6964, 0.5667, 0.4932)),
    "UniEmb": _row((0.33, 0.63, 1.17, 2.04, 2.65), (0.9613, 0.8921, 0.7800, 0.6762)),
    "NestPipe": _row((0.37, 0.72, 1.43, 2.80, 4.14), (0.9839, 0.9733, 0.9563, 0.9407)),
}
NESTED_2D = "NestPipe + 2D-SP"
NESTED_2D_EFFICIENCY, NESTED_SPEEDUP, NESTED_2D_SPEEDUP = 0.9717, 3.06, 3.18
GROUPS = 4  # of 2D-SP
LOOKUP_SHARE, COMM_SHARE, COMPUTE_SHARE = 0.244, 0.092, 0.664  # of TorchRec's step at 128
COMPUTE_SHARE_2D = 0.705  # of 2D-SP's step at 128

# Milliseconds at 1,536 workers; they calibrate nothing.
STEP_1536 = {"TorchRec": 5793.83, "2D-SP": 4914.01, "UniEmb": 2919.76, "NestPipe": 1895.98}
LOOKUP_1536, COMM_1536, COMM_2D_1536 = 2870.99, 1207.85, 452.34
VISIBLE_LOOKUP_1536, EXPOSED_COMM_1536 = 30.19, 154.23  # of NestPipe
COMPUTE_1536 = STEP_1536["NestPipe"] - VISIBLE_LOOKUP_1536 - EXPOSED_COMM_1536


@dataclass(frozen=True)
class HspRow:
    """TurboGR's hierarchical sparse parallelism, in milliseconds."""

    step: float
    all_to_all: float
    communication: float


HSP_BASE, HSP = HspRow(1970.0, 498.0, 613.0), HspRow(1790.0, 120.0, 373.0)
SEMI_ASYNC_BASE_MS, SEMI_ASYNC_BASE_SHARE, SEMI_ASYNC_SHARE = 459.29, 0.2412, 0.0219


@dataclass(frozen=True)
class SixStageRow:
    """TurboGR's pipeline of six stages: milliseconds, and the share of a step that computes."""

    compute: float
    communication: float
    utilisation: float


SIX_STAGES = {
    "FuXi-large": SixStageRow(656.39, 326.56, 0.9425),
    "FuXi-long": SixStageRow(1712.00, 436.71, 0.9429),
}


@dataclass(frozen=True)
class LinearityRow:
    """A model of TurboGR: TFLOPs of a device and step, samples a second, MFU, linearity."""

    teraflops: float
    samples_per_second: float
    mfu: float
    linearity: float


LINEARITY = {
    "HSTU-tiny": LinearityRow(0.13, 3475.17, 0.0043, 0.38),
    "HSTU-small": LinearityRow(0.59, 3508.59, 0.0196, 0.58),
    "FuXi-tiny": LinearityRow(0.27, 3441.32, 0.0088, 0.35),
    "FuXi-small": LinearityRow(1.18, 3218.31, 0.0378, 0.50),
    "FuXi-medium": LinearityRow(3.13, 2812.24, 0.1676, 0.74),
    "FuXi-large": LinearityRow(8.25, 1156.26, 0.3934, 0.94),
    "FuXi-long": LinearityRow(11.54, 574.39, 0.5471, 0.97),
}
DEVICES, BATCH_LARGE = 128, 2  # of the linearity rows: the largest cluster, FuXi-large's batch
