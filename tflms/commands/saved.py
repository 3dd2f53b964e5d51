"""Reads and writes training graphs kept in files: MetaGraphDef or GraphDef, binary or text."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tflms.commands.options import add_config_options
from tflms.errors import ConfigError, GraphError

_TEXT = (".pbtxt", ".txt")


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names a saved graph, its loss and its fetches, and how it is to be rewritten."""
    parser.add_argument(
        "graph",
        type=Path,
        help="a MetaGraphDef (.meta) or a GraphDef (.pb), binary, or as text (.pbtxt); it must "
        "hold the training step, gradients included",
    )
    parser.add_argument(
        "--loss",
        required=True,
        metavar="NAME",
        help="the tensor that the gradients were taken of, such as loss:0",
    )
    parser.add_argument(
        "--fetch",
        action="append",
        default=[],
        metavar="NAME",
        dest="fetches",
        help="what a step runs; repeat for several (default: what updates variables)",
    )
    parser.add_argument("--save-report", type=Path, metavar="FILE", help="write the report as JSON")
    add_config_options(parser)


def load(path: Path) -> tuple[Any, bool]:
    """Return the graph in a file, and whether it was a MetaGraphDef.

    Raises:
        ConfigError: the file cannot be read.
        GraphError: it holds no graph.
    """
    import tensorflow as tf
    from google.protobuf import text_format  # type: ignore[import-untyped]
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    kinds = (tf.compat.v1.MetaGraphDef, tf.compat.v1.GraphDef)
    for kind in kinds:
        message = kind()
        try:
            if path.suffix in _TEXT:
                text_format.Parse(content.decode("utf-8"), message)
            else:
                message.ParseFromString(content)
        except (DecodeError, text_format.ParseError, UnicodeDecodeError):
            continue
        is_meta = kind is kinds[0]
        nodes = message.graph_def.node if is_meta else message.node
        if not nodes:
            continue
        return _imported(message, is_meta, path), is_meta
    raise GraphError(
        f"{str(path)!r} is neither a MetaGraphDef nor a GraphDef with operations in it; write one "
        "with tf.compat.v1.train.export_meta_graph or tf.io.write_graph"
    )


@contextlib.contextmanager
def step_marked(graph: Any, names: Sequence[str]) -> Iterator[None]:
    """Let the graph say what a step runs while the block lasts, where it does not say so itself.

    TensorFlow's optimizers take what has to be kept from the collection ``train_op``, which a
    GraphDef cannot hold and a MetaGraphDef may lack.
    """
    import tensorflow as tf

    key = tf.compat.v1.GraphKeys.TRAIN_OP
    if graph.get_collection(key):
        yield
        return
    for name in names:
        graph.add_to_collection(key, graph.as_graph_element(name))
    try:
        yield
    finally:
        graph.clear_collection(key)


def save(graph: Any, path: Path, *, is_meta: bool) -> None:
    """Write a graph to a file of the kind that it came from; text where the name says so.

    Raises:
        ConfigError: the file cannot be written.
    """
    import tensorflow as tf
    from google.protobuf import text_format

    if is_meta:
        with graph.as_default():  # TensorFlow refuses to export where eager execution is on
            message = tf.compat.v1.train.export_meta_graph()
    else:
        message = graph.as_graph_def(add_shapes=True)
    text = path.suffix in _TEXT
    content = text_format.MessageToString(message).encode() if text else message.SerializeToString()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _imported(message: Any, is_meta: bool, path: Path) -> Any:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        try:
            if is_meta:
                tf.compat.v1.train.import_meta_graph(message)
            else:
                tf.import_graph_def(message, name="")
        except (ValueError, tf.errors.OpError) as error:
            raise GraphError(f"TensorFlow cannot import {str(path)!r}: {error}") from None
    return graph
