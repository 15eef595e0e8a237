"""Faithfulness of heat maps: does a map name the patches that the model uses?

Patches are dropped in the order of the map, or added, and the probability of the class must fall,
or rise, faster than in random orders: deletion and insertion of RISE (arXiv 1806.07421), on tokens
instead of pixels. Patches are really dropped, as grey ones mislead ("Missingness Bias in Model
Debugging", arXiv 2204.08945).
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitkit import errors, randomness, shapes
from vitkit.evaluation.intervals import SIGNIFICANCE_LEVEL
from vitkit.explaining.methods import Method, class_scores, occlusion
from vitkit.io.atomic import write_bytes
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT

STEPS = 10
"""Steps from all patches to one."""
RANDOM_ORDERS = 20
"""Half of them are drawn, the others are their reverses."""
ROWS = 64
"""Forward passes at a time."""
CHEAP = 1e11
"""Multiplications of what is measured without being asked for: about a second on a CPU."""
ROUNDING = 1e-6
"""Probabilities that differ by less count as equal: the same patches in another batch do."""
EXACT_PAIRS, DRAWS, CHUNK = 14, 9_999, 1_000
"""Pairs up to which all assignments of signs are counted; else random ones; those in memory."""
LEAST_TAIL = 40
"""One in so many medians lies below the interval, and one above: 95 % are inside."""
Orders = Int64[Tensor, "B O N"]
References = Float64[np.ndarray, "B 22"]
"""Insertion areas with which maps are compared: of 20 random orders, each beside its reverse; of
the order of token occlusion; of the reverse of it, which is occlusion's deletion area."""
Verdict: TypeAlias = Literal[
    "better than chance",
    "no better than chance",
    "too few patches to tell",
    "too few images to tell",
]

TERMS = (
    (
        "deletion",
        "Patches are dropped in the order of the map. 1: the probability of the class falls as "
        "fast as in the order of occlusion, which drops each patch alone to rank them. 0: as in a "
        "random order. Not measurable: the order of occlusion hardly beats random ones.",
    ),
    ("insertion", "The same while patches are added, the most important first."),
    (
        "p",
        "The share of 21 orders, 20 random ones and the map's, in which deletion and insertion "
        "together do at least as well. Better than chance: p is below 0.05. No better than "
        "chance: it is 0.05 or more. Too few patches to tell: few patches have few orders, so that "
        "random ones are often as good as the best one, and p says nothing.",
    ),
)
"""The words of a line of faithfulness and their meanings."""


@dataclass(frozen=True)
class Faithfulness:
    """How well the map of one image names the patches that the model uses.

    Attributes:
        deletion: 1 if dropping patches in the map's order lowers the probability as much as in the
            order of token occlusion, 0 if only as much as in a random order; below 0 if less. None
            where it is not measurable, as even occlusion does not beat random orders clearly.
        insertion: the same while patches are added.
        p: the share of orders, 20 random ones and the map's, whose difference of insertion and
            deletion is at least the map's; 1/21 at least.
        deletion_area: mean probability while patches are dropped, in [0, 1].
        insertion_area: mean probability while patches are added, in [0, 1].
        random_area: the mean of both over random orders.
        verdict: `better than chance` if p is below 0.05, else `no better than chance`, or `too few
            patches to tell` where the best order would not differ from random ones either.
    """

    deletion: float | None
    insertion: float | None
    p: float
    deletion_area: float
    insertion_area: float
    random_area: float
    verdict: Verdict

    @property
    def gain(self) -> float:
        """Insertion area minus deletion area, in [-1, 1]; larger means better."""
        return self.insertion_area - self.deletion_area

    @property
    def line(self) -> str:
        """One line: `deletion 0.71, insertion 0.64 (better than chance, p = 0.048)`."""
        return _line(self.deletion, self.insertion, self.verdict, self.p)

    def as_json(self) -> dict[str, float | str | None]:
        """Return the attributes as plain values; None where not measurable."""
        return asdict(self)


@dataclass(frozen=True)
class FaithfulnessReport:
    """The faithfulness of a method's maps over several images.

    Attributes:
        method: its name.
        options: its options that were set.
        scores: of each image, one or more.
    """

    method: str
    options: Mapping[str, Any]
    scores: tuple[Faithfulness, ...]

    @property
    def deletion(self) -> float | None:
        """The median over the images where it is measurable, 1 at best; see `Faithfulness`."""
        return self._median("deletion")

    @property
    def insertion(self) -> float | None:
        """The median over the images where it is measurable, 1 at best; see `Faithfulness`."""
        return self._median("insertion")

    @property
    def deletion_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median deletion; None for fewer than six measurable images."""
        return median_interval(self._measurable("deletion"))

    @property
    def insertion_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median insertion; None for fewer than six measurable images."""
        return median_interval(self._measurable("insertion"))

    def _measurable(self, name: str) -> list[float]:
        found = [getattr(score, name) for score in self.scores]
        return [*filter(lambda value: value is not None, found)]

    def _median(self, name: str) -> float | None:
        values = self._measurable(name)
        if values:
            return float(np.median(values))
        return None

    @cached_property
    def p(self) -> float:
        """The p-value of a paired permutation test that insertion is not above deletion."""
        return paired_permutation([score.gain for score in self.scores])

    @property
    def verdict(self) -> Verdict:
        """`better than chance`, `no better than chance` or `too few images to tell`, by `p`."""
        if self.p < SIGNIFICANCE_LEVEL:
            return "better than chance"
        # differences of 0 prove nothing, and the others have 2^n assignments of signs;
        # without any difference, no patch of any image matters to the model
        count = sum(abs(score.gain) > ROUNDING for score in self.scores) or len(self.scores)
        if count and 0.5**count >= SIGNIFICANCE_LEVEL:
            return "too few images to tell"
        return "no better than chance"

    @property
    def line(self) -> str:
        """The medians in one line, as `Faithfulness.line`."""
        return _line(self.deletion, self.insertion, self.verdict, self.p)

    @property
    def lines(self) -> tuple[str, ...]:
        """The medians, and on how many images they rest with their 95 % intervals."""
        count = len(self._measurable("deletion"))
        words = f"images: medians; deletion is measurable on {count} of {len(self.scores)}"
        for name in ("deletion", "insertion"):
            interval = median_interval(self._measurable(name))
            if interval is not None:
                words += f", 95 % interval of {name} {interval[0]:.2f} to {interval[1]:.2f}"
        return self.line, words

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; None where not measurable."""
        return asdict(self) | {
            "images": len(self.scores),
            "measurable": len(self._measurable("deletion")),
            "deletion": self.deletion,
            "deletion_interval": self.deletion_interval,
            "insertion": self.insertion,
            "insertion_interval": self.insertion_interval,
            "p": self.p,
            "verdict": self.verdict,
        }


def write_reports(
    path: Path,
    checkpoint: Path | None,
    images: Sequence[str],
    reports: Sequence[FaithfulnessReport],
) -> None:
    """Write the reports of several methods on the same images as JSON."""
    methods = {report.method: report.as_json() for report in reports}
    document = {"checkpoint": str(checkpoint), "images": [*images], "methods": methods}
    write_bytes(path, (json.dumps(document, indent=1) + "\n").encode())


def _line(deletion: float | None, insertion: float | None, verdict: Verdict, p: float) -> str:
    shown = []
    for name, value in {"deletion": deletion, "insertion": insertion}.items():
        shown.append(f"{name} not measurable" if value is None else f"{name} {value:.2f}")
    return f"{', '.join(shown)} ({verdict}, p = {p:.2g})"


def check_measurable(model: ViT, method: Method | None = None) -> None:
    """Refuse a model without a head, and a method whose maps are colours without an order.

    Raises:
        SettingError: the faithfulness of the maps cannot be measured.
    """
    reason = ""
    if model.spec.num_classes == 0:
        reason = "the model has no head, so no probability falls when patches are dropped"
    elif method and method.colours:
        reason = f"those of {method.name!r} are colours, not importance; choose another method"
    if reason:
        raise errors.SettingError(f"the faithfulness of maps cannot be measured: {reason}")


def is_cheap(model: ViT, images: shapes.Images) -> bool:
    """Return whether measuring one image takes few multiplications, by a rough count.

    Each parameter of a block is used once for each token: in about 100 passes with half of the
    patches on average each, and in one pass for each patch.

    Args:
        model: the model.
        images: (B, C, H, W), for the number of patches.
    """
    height, width = model.patch_embed.grid(images)
    tokens = height * width
    parameters = sum(parameter.numel() for parameter in model.blocks.parameters())
    return parameters * tokens * (100 + tokens) < CHEAP


def references(
    model: ViT, images: shapes.Images, classes: class_scores.Classes, *, seed: int = 0
) -> References:
    """Measure 20 random orders and token occlusion once, for the maps of several methods.

    Arguments as for `measure_faithfulness`.
    """
    check_measurable(model)
    with eval_mode(model), torch.inference_mode():
        return reference_areas(
            occlusion.TokenSubsets(model, images), classes, image_keys(images), seed
        )


def measure_faithfulness(
    model: ViT,
    images: shapes.Images,
    grids: class_scores.Maps,
    classes: class_scores.Classes,
    *,
    seed: int = 0,
    reference: References | None = None,
) -> list[Faithfulness]:
    """Measure the maps of a batch of images; what is found for an image depends on no other image.

    It costs about as much as 100 forward passes an image and one for each patch; with a
    `reference`, as much as 20.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        grids: a value for each patch, larger = more important.
        classes: the class that each map explains, (B,).
        seed: of the random orders.
        reference: of the same images and classes, as `references` measures it; default: measured
            here.

    Raises:
        SettingError: a model without a head.
        ShapeError: maps that do not have the model's patches.
    """
    expected = (len(images), *model.patch_embed.grid(images))
    if grids.shape != expected:
        raise errors.ShapeError(
            f"maps have the shape {tuple(grids.shape)}; expected {expected}, a value for each "
            "patch of each image"
        )
    if reference is None:
        reference = references(model, images, classes, seed=seed)
    orders = map_orders(grids, image_keys(images), seed)
    both = torch.stack([orders.flip(1), orders], dim=1)
    with eval_mode(model), torch.inference_mode():
        areas = insertion_areas(occlusion.TokenSubsets(model, images), classes, both)
    deletion, insertion = areas.T
    dropped = normalised_areas(deletion, reference, deletion=True)
    added = normalised_areas(insertion, reference, deletion=False)
    random = reference[:, :RANDOM_ORDERS]
    # each order beside its reverse, whose insertion area is its deletion area
    gains = random - random.reshape(len(random), -1, 2)[..., ::-1].reshape(len(random), -1)
    found = []
    for row in range(len(images)):
        gain = float(insertion[row] - deletion[row])
        found.append(
            Faithfulness(
                _measured(dropped[row]),
                _measured(added[row]),
                p=_chance_p(gain, gains[row]),
                deletion_area=float(deletion[row]),
                insertion_area=float(insertion[row]),
                random_area=float(random[row].mean()),
                verdict=verdict_of_map(gain, gains[row], orders.shape[1]),
            )
        )
    return found


def _measured(share: float) -> float | None:
    if math.isnan(share):
        return None
    return float(share)


def normalised_areas(
    areas: Float64[np.ndarray, " B"], reference: References, *, deletion: bool
) -> Float64[np.ndarray, " B"]:
    """Return (random - area) / (random - greedy): 0 for chance, 1 for token occlusion.

    NaN marks images on which it cannot be measured: there the greedy order itself is not better
    than the mean of the random orders by at least their standard deviation.

    Args:
        areas: of the maps' orders (B,).
        reference: of the same images and classes.
        deletion: whether they are deletion areas (small is good) or insertion areas.
    """
    random = reference[:, :RANDOM_ORDERS]
    mean = random.mean(axis=1)
    greedy = reference[:, -1 if deletion else -2]
    # the sign of both differences changes with the test, and their ratio does not
    span = mean - greedy if deletion else greedy - mean
    measurable = span > np.maximum(random.std(axis=1), 1e-9)
    score = np.full(len(areas), np.nan)
    np.divide(mean - areas, mean - greedy, out=score, where=measurable)
    return score


def _log_probability(
    subsets: occlusion.TokenSubsets,
    classes: class_scores.Classes,
    patches: Int64[Tensor, "R n"],
    image: Int64[Tensor, " R"],
) -> Float64[Tensor, " R"]:
    """Return the log-probability of its image's class for each pass with some of the patches."""
    found = []
    wanted = classes.cpu()[image].unsqueeze(1)  # R 1
    for part in torch.arange(len(patches)).split(ROWS):
        # float64: probabilities near 0 and 1 are told apart, and MPS has none
        logits = subsets.logits(patches[part], image[part]).cpu().double()
        found.append(logits.log_softmax(dim=1).gather(1, wanted[part]).squeeze(1))
    return torch.cat(found)


def reference_areas(
    subsets: occlusion.TokenSubsets,
    classes: class_scores.Classes,
    keys: Int64[np.ndarray, " B"],
    seed: int,
) -> References:
    """Measure 20 random orders and the greedy order of occlusion.

    Args:
        subsets: of B images.
        classes: the class of each image, (B,).
        keys: of the images, as `image_keys` gives them.
        seed: of the random orders, which depend on it and on the image alone.
    """
    random = random_orders(keys, subsets.count, seed)
    greedy = _occlusion_order(subsets, classes).unsqueeze(1)  # B 1 N
    return insertion_areas(subsets, classes, torch.cat([random, greedy, greedy.flip(2)], 1))


def insertion_areas(
    subsets: occlusion.TokenSubsets, classes: class_scores.Classes, orders: Orders
) -> Float64[np.ndarray, "B O"]:
    """Return the mean probability of the class while patches are added in an order.

    It is the area under the curve by trapezoids, from 1 patch to all N in ten steps, divided by
    its width. Dropping in an order is adding in its reverse.

    Args:
        subsets: of B images.
        classes: the class of each image, (B,).
        orders: O orders of each image, (B, O, N).

    Returns:
        (B, O) in [0, 1].
    """
    batch, count, patches = orders.shape
    image = torch.arange(batch).repeat_interleave(count)
    flat = orders.flatten(0, 1)  # B O, N
    # from 1 to all of them, each once
    sizes = sorted({max(1, round(patches * step / STEPS)) for step in range(STEPS + 1)})
    curve = []
    for kept in sizes[:-1]:
        staying = flat[:, :kept].sort(dim=1).values
        curve.append(_log_probability(subsets, classes, staying, image).exp())
    # with all patches, all orders of an image are the same
    every = torch.arange(patches).expand(batch, -1)
    curve.append(_log_probability(subsets, classes, every, torch.arange(batch)).exp()[image])
    heights = torch.stack(curve, dim=1)  # B O, S
    if len(sizes) == 1:
        return heights[:, 0].view(batch, count).numpy()
    across = torch.tensor(sizes, dtype=torch.float64)
    area = torch.trapezoid(heights, across, dim=1) / (sizes[-1] - sizes[0])
    return area.view(batch, count).numpy()


def _occlusion_order(
    subsets: occlusion.TokenSubsets, classes: class_scores.Classes
) -> Int64[Tensor, "B N"]:
    """Order the patches by how far the class's probability falls if one alone is removed."""
    batch, count = len(classes), subsets.count
    if count == 1:
        return torch.zeros(batch, 1, dtype=torch.int64)
    numbers = torch.arange(count)
    # row i is all patches but i
    others = numbers.expand(count, -1)[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    image = torch.arange(batch).repeat_interleave(count)
    rest = _log_probability(subsets, classes, others.repeat(batch, 1), image)
    # the lower the probability without the patch, the more it matters
    return rest.view(batch, count).argsort(dim=1, stable=True)


def random_orders(keys: Int64[np.ndarray, " B"], patches: int, seed: int) -> Orders:
    """Return 10 random orders of each image and their reverses, (B, 20, N).

    With the reverses, the difference of insertion and deletion is symmetric about 0, and each pass
    serves both tests.
    """
    orders = np.empty((len(keys), RANDOM_ORDERS, patches), np.int64)
    for row, key in enumerate(keys):
        for draw in range(0, RANDOM_ORDERS, 2):
            order = randomness.permutation(int(randomness.hash64(seed, key)), draw, patches)
            orders[row, draw] = order
            orders[row, draw + 1] = order[::-1]
    return torch.from_numpy(orders)


def map_orders(
    grids: class_scores.Maps, keys: Int64[np.ndarray, " B"], seed: int
) -> Int64[Tensor, "B N"]:
    """Order the patches of each image from the largest value to the smallest.

    Equal values come in a random order that depends on the seed and the image alone: in the order
    of their numbers, a map that is constant would be a map of the top rows.
    """
    values = grids.detach().flatten(1).cpu().double().numpy()
    orders = np.empty(values.shape, np.int64)
    for row, key in enumerate(keys):
        ties = randomness.hash64(seed, key, -1, np.arange(values.shape[1]))
        orders[row] = np.lexsort((ties, -values[row]))
    return torch.from_numpy(orders)


def image_keys(images: shapes.Images) -> Int64[np.ndarray, " B"]:
    """Return a number for each image that depends on its own pixels alone."""
    numbers = images.detach().cpu().float().contiguous().numpy()
    return np.array([zlib.crc32(image.tobytes()) for image in numbers], np.int64)


def verdict_of_map(value: float, random: Float[np.ndarray, " n"], patches: int) -> Verdict:
    """Return whether the order of a map is better than random orders, if that can be seen at all.

    With few patches, random orders are often the best order itself, so that even the best map has
    a p-value above the threshold of 0.05: n random orders hold it n / patches! times on average.
    The same is true where no random order is better than the map's but some are as good.

    Args:
        value: insertion minus deletion in the order of the map; larger means better.
        random: the same of n random orders.
        patches: of the image.

    >>> verdict_of_map(0.5, np.linspace(-0.4, 0.4, 20), patches=64)
    'better than chance'
    >>> verdict_of_map(0.4, np.linspace(-0.4, 0.4, 20), patches=4)
    'too few patches to tell'
    """
    if _chance_p(value, random) < SIGNIFICANCE_LEVEL:
        return "better than chance"
    # `math.factorial` is exact; a quotient too small for a float is 0
    expected = (1 + len(random) / math.factorial(patches)) / (1 + len(random))
    equal = np.abs(random - value) <= ROUNDING
    # where all are equal, no order matters to the model
    as_good = equal.any() and not equal.all() and not (random > value + ROUNDING).any()
    if expected >= SIGNIFICANCE_LEVEL or as_good:
        return "too few patches to tell"
    return "no better than chance"


def _chance_p(value: float, random: Float[np.ndarray, " n"]) -> float:
    """Return how often chance does as well, counting the value itself as one of the draws."""
    # p is never 0: "Permutation P-values Should Never Be Zero", Phipson and Smyth 2010
    return float((1 + (random >= value).sum()) / (1 + len(random)))


def paired_permutation(
    differences: Float[np.ndarray, " n"] | Sequence[float], *, seed: int = 0
) -> float:
    """Return the one-sided p-value, in (0, 1], of a mean difference that is not above 0.

    Fisher's randomisation test: p is the share of assignments of signs to the differences whose
    mean is at least that of the data, of all of them for up to 14 pairs, else of 9,999 random ones
    and the data themselves.

    Args:
        differences: first minus second of each pair, (n,).
        seed: of the random assignments.
    """
    values = np.asarray(differences, np.float64)
    if len(values) == 0:
        return 1.0
    # sums of the same numbers in another order differ in their last bits
    least = values.sum() - 1e-12 * np.abs(values).sum()
    if len(values) <= EXACT_PAIRS:
        numbers = np.arange(2 ** len(values))[:, None]
        signs = 1.0 - 2.0 * ((numbers >> np.arange(len(values))) & 1)
        return float((signs @ values >= least).mean())
    generator = np.random.default_rng(seed)
    count = 1
    for start in range(0, DRAWS, CHUNK):
        size = (min(CHUNK, DRAWS - start), len(values))
        signs = 1.0 - 2.0 * generator.integers(0, 2, size)
        count += int((signs @ values >= least).sum())
    return count / (1 + DRAWS)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a median, from the ranks of the values (a sign test's).

    The numbers of values below the true median are binomial, whatever the distribution is.

    Args:
        values: of n images.

    Returns:
        Two of the values; None for fewer than six, which have no such interval.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    ordered = sorted(values)
    count, rank = len(ordered), 0
    tail = 1  # the sum of binomial coefficients up to `rank`
    while LEAST_TAIL * tail <= 2**count:
        rank += 1
        tail += math.comb(count, rank)
    if rank == 0:
        return None
    return float(ordered[rank - 1]), float(ordered[-rank])
