"""Sweeps of your own: a scenario as a trainable for Ray Tune, with your search space and scheduler.

from ray import tune
from rayfed import scenario
from rayfed.tune import trainable

tuner = tune.Tuner(trainable(scenario.load("mine.yaml")), param_space={"training.lr": tune.loguniform(0.01, 1)})
"""

from actors.trial import trainable

__all__ = ["trainable"]
