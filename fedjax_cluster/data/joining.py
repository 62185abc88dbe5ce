"""Several data sets as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_cluster.data.validation import check_examples, check_undivided
from fedjax_cluster.types import Examples


def joined(sources: Sequence[Examples]) -> Examples:
    """Several labelled data sets as one, in which each has classes of its own: MNIST's 0 … 9, Fashion-MNIST's 10 … 19.

    Args:
      sources: two or more, with x [N_i, ...] of one shape and dtype, y i32[N_i].

    Returns:
      Examples with x [ΣN_i, ...] and y i32[ΣN_i], in the order of the sources.

    Raises:
      ValueError: a single data set, one without classes or with a split, or inputs of different shapes or dtypes.

    >>> from fedjax_cluster.data import digits
    >>> both = joined([digits(), digits()])
    >>> both.x.shape, both.info.num_classes, both.info.name
    ((3594, 8, 8), 20, 'digits+digits')
    """
    check_fit(sources, "joined")
    counts = [source.info.num_classes for source in sources]
    for source in sources:
        if source.info.task != "classification" or np.ndim(source.y) != 1:
            raise ValueError(f"{source.info.name!r} has no classes that could be numbered: join labelled images alone.")
    starts = np.cumsum([0, *counts[:-1]])
    labels = [start + np.asarray(source.y) for start, source in zip(starts, sources, strict=True)]
    name = "+".join(source.info.name for source in sources)
    info = sources[0].info._replace(name=name, num_classes=sum(counts), class_names=class_names(sources))
    return Examples(
        np.concatenate([np.asarray(source.x) for source in sources]), np.concatenate(labels).astype(np.int32), info
    )


def class_names(sources: Sequence[Examples]) -> tuple[str, ...]:
    """What the classes of all are called, one source after the other; nothing where none has names."""
    names = [source.info.class_names or tuple(map(str, range(source.info.num_classes))) for source in sources]
    return sum(names, ()) if any(source.info.class_names for source in sources) else ()


def check_fit(sources: Sequence[Examples], what: str) -> None:
    """Raises ValueError unless these, which `what` needs, are two or more data sets with inputs of one kind."""
    if not isinstance(sources, list | tuple) or isinstance(sources, Examples) or len(sources) < 2:
        raise ValueError(
            f"{what} needs two or more data sets: pass a list, such as [tfds('mnist'), tfds('fashion_mnist')]."
        )
    for source in sources:
        check_examples(source)
        check_undivided(source, what)
    kinds = [(tuple(np.shape(source.x)[1:]), np.asarray(source.x).dtype) for source in sources]
    if len(set(kinds)) > 1:
        pairs = zip(sources, kinds, strict=True)
        listed = "; ".join(f"{source.info.name}: {dtype} {list(shape)}" for source, (shape, dtype) in pairs)
        raise ValueError(f"The data sets differ in their inputs ({listed}): bring them to one shape and dtype.")
