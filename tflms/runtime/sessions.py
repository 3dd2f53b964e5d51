"""Finds out whether a session has run an operation already, since it would ignore a later edit."""

from __future__ import annotations

import gc
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.client import session as tf_session

from tflms.errors import HandBackError


def open_sessions(tf_graph: Any) -> list[Any]:
    """Return the runtime's handles of the open sessions on a graph.

    Asked of the garbage collector, object by object that refers to the graph: a list of all
    objects would also hold tuples that other threads are still building.
    """
    handles = []
    for referrer in gc.get_referrers(tf_graph):
        if isinstance(referrer, tf_session.BaseSession):
            referrer = vars(referrer)
        if not isinstance(referrer, dict) or referrer.get("_graph") is not tf_graph:
            continue
        if referrer.get("_session") is not None and not referrer.get("_closed", True):
            handles.append(referrer["_session"])
    return handles


def refuse_if_run(tf_graph: Any) -> None:
    """Refuse to edit a graph that an open session has run.

    A session copies the whole graph at its first run; a later edit to what was copied is ignored,
    with nothing but a warning in a log.

    Raises:
        HandBackError: such a session is open.
    """
    for handle in open_sessions(tf_graph):
        if has_run(handle):
            raise HandBackError(
                "an open session has run this graph already and would ignore the rewrite; rewrite "
                "the graph first, then create the session (or close the session, rewrite, and "
                "create a new one)"
            )


def has_run(handle: Any) -> bool:
    """Tell whether a session has taken its copy of the graph, by asking it for what is not there.

    Without a copy it answers that it has no graph yet; with one, that there is no such node.
    Nothing is run either way.
    """
    options = config_pb2.CallableOptions(target=["tflms/no_such_node"])
    buffer = pywrap_tf_session.TF_NewBufferFromString(options.SerializeToString())
    try:
        pywrap_tf_session.TF_SessionMakeCallable(handle, buffer)
    except tf.errors.OpError as error:
        return "was not created with a graph" not in error.message
    finally:
        pywrap_tf_session.TF_DeleteBuffer(buffer)
    return True
