"""Imports that `plimsoll local` runs once, in the server process from which it forks all processes and restarts.

Nothing here starts a JAX backend or a thread, because neither survives a fork.
"""

import resource  # noqa: F401

import grain  # noqa: F401
import jax.experimental.multihost_utils  # noqa: F401
from orbax.checkpoint import multihost, v1

import plimsoll.framework.run.start
import plimsoll.framework.run.train
import plimsoll.launch.train  # noqa: F401
from plimsoll.framework.metrics.writers import import_writers

import_writers()
# Orbax imports these on first use, so use them here.
_ = v1.save_checkpointables_async, v1.Context, v1.handlers, multihost.get_barrier_sync_fn
