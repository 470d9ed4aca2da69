"""What the units of one tile have to do, whatever the tile: planes, WGMMAs, weight blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .sm90_area import up
from .sm90_task import MAX_KINDS, MAX_PAIRS, Triple
from .sm90_weights import STEP_PAIRS

if TYPE_CHECKING:
    from .sm90 import Job

SPLIT_PRODUCTS, SPLIT_PARTS = 3, 2
"""WGMMAs for two channel blocks of a tap, and numbers in shared memory for one of the input."""
SUM_PAIRS = 12
"""Pairs of a tap list that are summed by themselves at most, where float32 is split: a multiple of
STEP_PAIRS. Truncation then leaves an error of 1.4e-7, twice as many one of 2.9e-7, beside the
1.2e-7 of everything else; PyTorch's is 1.1e-7 at best."""

SHORT_SUM = 8
"""Pairs of a whole sum that PyTorch adds up with so small an error that even these are too many in
one part: kb75 has 6, and 2.6e-7 of the largest output where PyTorch has 1.3e-7."""

MAX_JOBS, MAX_BLOCKS, MAX_VISITS = 128, 4, 128
"""How much the kernel's parameters hold, as in csrc/cuda/sm90_params.h."""
PAIR_BYTES, VISIT_BYTES = 4, 48
"""Of the tables of pairs and visits; together these are rounded to 128 bytes."""


def visits(job_list: list[Job], alternate: bool) -> list[tuple[tuple[Job, ...], list[Triple]]]:
    """The jobs of each unit of a tile, one or two, and the planes that any of them reads."""
    size = 1 if alternate else 2
    groups = [tuple(job_list[i : i + size]) for i in range(0, len(job_list), size)]
    return [
        (group, sorted({plane for job in group for kind in job.kinds for plane in kind.planes}))
        for group in groups
    ]


@dataclass(frozen=True)
class Load:
    """What all units of a tile have to do for one channel slice, whatever the tile."""

    groups: int
    visits: int
    """Of all units together."""
    most_visits: int
    table: int
    """Entries of the table of visits; units with the same tap lists share theirs."""
    kinds: int
    pair_count: int
    """Entries of the table of pairs."""
    pairs: int
    """WGMMAs of all jobs, three for a pair where float32 is split. Twice those of a job whose
    partner idles: one consumer by itself takes as long as two (192 output channels, 5 x 5, in TF32:
    0.85 ms in pairs of which one idles, 0.65 in turn)."""
    steps: int
    """Weight blocks of all jobs."""
    job_steps: int
    """Those of each job, 0 where they differ."""
    longest: int
    """Pairs of the longest tap list."""
    sum_pairs: int
    additions: int
    """Of parts of tap lists to the sums, but for the last part of each."""

    @staticmethod
    def of(
        job_list: list[Job],
        alternate: bool,
        slice_blocks: int,
        split: bool = False,
        whole: bool = False,
    ) -> Load:
        """`whole`: a slice has all channels."""
        units = visits(job_list, alternate)
        table = {tuple(job.kinds for job in group): len(planes) for group, planes in units}
        kinds = {kind: None for job in job_list for kind in job.kinds}
        lists = {kind: [len(taps) * slice_blocks // 2 for _, taps in kind.taps] for kind in kinds}
        every = [pairs for job in job_list for kind in job.kinds for pairs in lists[kind]]
        lone = [job for group, _ in units if not alternate and len(group) == 1 for job in group]
        alone = sum(pairs for job in lone for kind in job.kinds for pairs in lists[kind])
        longest = max(every, default=0)
        sum_pairs = even_part(longest) if split else 0
        short = whole and longest <= SHORT_SUM and all(len(planes) <= 1 for _, planes in units)
        if split and short:
            sum_pairs = STEP_PAIRS
        of_jobs = [
            sum(step_count(pairs, sum_pairs) for kind in job.kinds for pairs in lists[kind])
            for job in job_list
        ]
        # A job that idles brings tap lists of its own, empty ones.
        idle = len(job_list[0].kinds) if not alternate and len(job_list) % 2 else 0
        return Load(
            groups=len(units),
            visits=sum(len(planes) for _, planes in units),
            most_visits=max(len(planes) for _, planes in units),
            table=sum(table.values()),
            kinds=len(kinds) + idle,
            pair_count=sum(up(pairs, STEP_PAIRS) for each in lists.values() for pairs in each),
            pairs=(sum(every) + alone) * (SPLIT_PRODUCTS if split else 1),
            steps=sum(of_jobs),
            job_steps=of_jobs[0] if len(set(of_jobs)) == 1 and not idle else 0,
            longest=longest,
            additions=sum(-(-pairs // sum_pairs) - 1 for pairs in every if pairs) if split else 0,
            sum_pairs=sum_pairs,
        )

    @property
    def fits(self) -> bool:
        return self.pair_count <= MAX_PAIRS and self.kinds <= MAX_KINDS and self.table <= MAX_VISITS

    @property
    def table_bytes(self) -> int:
        return up(self.pair_count * PAIR_BYTES + self.table * VISIT_BYTES, 128)


def sum_slices(load: Load) -> int:
    """Slices that are summed by themselves where float32 is split: of short tap lists more than
    one. All products of the later ones meet a sum that truncation can take from."""
    pairs = max(load.longest, 1)
    return 1 + max(SUM_PAIRS - pairs, 0) // (SPLIT_PRODUCTS * pairs)


def even_part(pairs: int) -> int:
    """Pairs that are summed by themselves: as few parts as may be, about the same size."""
    parts = max(-(-pairs // SUM_PAIRS), 1)
    return up(max(-(-pairs // parts), 1), STEP_PAIRS)


def step_count(pairs: int, sum_pairs: int) -> int:
    """Weight blocks of a tap list: whole ones, then what is left as 2 and 1. Where float32 is
    split: of its parts of `sum_pairs`, and three times, as tails and as heads for both."""
    if sum_pairs:
        parts, left = divmod(pairs, sum_pairs)
        return SPLIT_PRODUCTS * (parts * step_count(sum_pairs, 0) + step_count(left, 0))
    return pairs // STEP_PAIRS + (pairs % STEP_PAIRS).bit_count()
