"""Cohorts of a tiny world, ready to train, for tests of the trainer."""

from __future__ import annotations

from dataclasses import replace

from fedgist.engines.plans.plan import Plan
from fedgist.testing.small_worlds import federation, local_engine
from fedgist.training.cohort import Clients, Cohort
from fedgist.world.world import World


def asked(small: World, plan: Plan) -> tuple[Cohort, Clients]:
    """Return the first cohort of all clients before the training of round 1."""
    engine, side = local_engine(small, plan), small.server
    fed = federation(small, plan)
    ctx = fed.context("train", 1)
    orders = side.method.select(fed.server, side.online(1), ctx)
    downs = [side.method.download(fed.server, order, ctx) for order in orders]
    return engine.trial(replace(ctx, key=engine.host.key), orders, downs)
