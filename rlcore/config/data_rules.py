"""Rules between the keys of section `data`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcore.config.problems import Problem

if TYPE_CHECKING:
    from rlcore.config.run import RunConfig


def weights_name_every_training_file(config: "RunConfig") -> Iterator[Problem]:
    """`data.train_weights` has one weight per file."""
    data = config.data
    if data.train_weights is not None and len(data.train_weights) != len(data.train_files):
        yield Problem(
            path="data.train_weights",
            value=data.train_weights,
            reason=(
                f"{len(data.train_weights)} weights for {len(data.train_files)} files in "
                "data.train_files"
            ),
            fix="give one weight per file",
            involves=("data.train_files",),
        )


def one_thing_chooses_the_rows(config: "RunConfig") -> Iterator[Problem]:
    """Weights, a sampler and a data set class each decide on the order or the files alone."""
    data = config.data
    if data.train_weights is not None and data.sampler.class_name is not None:
        yield Problem(
            path="data.train_weights",
            value=data.train_weights,
            reason=f"it contradicts data.sampler.class_name={data.sampler.class_name}",
            fix="let one of the two choose the rows",
            involves=("data.sampler.class_name",),
        )
    if data.train_weights is not None and data.custom_cls.path is not None:
        yield Problem(
            path="data.train_weights",
            value=data.train_weights,
            reason=f"it contradicts data.custom_cls.path={data.custom_cls.path}, which reads files",
            fix="leave one of the two out",
            involves=("data.custom_cls.path",),
        )


def class_and_file_go_together(config: "RunConfig") -> Iterator[Problem]:
    """A path needs the name of what is in it, and settings need something to set."""
    custom, sampler = config.data.custom_cls, config.data.sampler
    if (custom.path is None) != (custom.name is None):
        given, missing = ("path", "name") if custom.name is None else ("name", "path")
        yield Problem(
            path=f"data.custom_cls.{missing}",
            reason=f"data.custom_cls.{given}={getattr(custom, given)} needs it",
            fix="give the file and the class in it, or neither",
            involves=(f"data.custom_cls.{given}",),
            has_value=False,
        )
    if sampler.class_name is None and sampler.class_path is not None:
        yield Problem(
            path="data.sampler.class_name",
            reason=f"data.sampler.class_path={sampler.class_path} needs it",
            fix="name the class in that file",
            involves=("data.sampler.class_path",),
            has_value=False,
        )
    if sampler.class_name is None and sampler.kwargs:
        yield Problem(
            path="data.sampler.kwargs",
            value=sampler.kwargs,
            reason="it has no effect without data.sampler.class_name",
            fix="leave it out, or name a sampler",
            involves=("data.sampler.class_name",),
        )


DATA_RULES = (
    weights_name_every_training_file,
    one_thing_chooses_the_rows,
    class_and_file_go_together,
)
