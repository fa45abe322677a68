"""What the next choice may cost, as far as the ones that were measured tell.

The logarithm of a cost is taken to be linear in a few features of a choice, with slopes that are known roughly
beforehand (Bayesian linear regression with Gaussian prior and noise; Bishop, Pattern Recognition and Machine
Learning, 3.3). Where little is known of a slope a guess is low, so that a walk tries what it knows nothing of, and
what it has seen to be of no use no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Trend:
    """Slopes of log(cost) per feature."""

    def __init__(self, slopes: Sequence[float], *, spread: float, noise: float):
        """
        Args:
          slopes: expected beforehand, one per feature. spread: their standard deviation. noise: that of the log of a
            measurement, for what is measured and for what is not linear.
        """
        self._slopes, self._noise = np.asarray(slopes, np.float64), noise
        self._precision = np.eye(len(slopes)) / spread**2
        self._features: list[np.ndarray] = []
        self._logs: list[float] = []

    def learn(self, features: Sequence[float], cost: float) -> None:
        """A measurement; `cost` is positive."""
        self._features.append(np.asarray(features, np.float64))
        self._logs.append(math.log(cost))

    def guess(self, features: Sequence[float], like: Sequence[float], cost: float) -> float:
        """What a choice may cost at best, a standard deviation below what is expected, where one `like` it costs
        `cost`. Both have `features`."""
        slopes, covariance = self._posterior()
        step = np.asarray(features, np.float64) - like
        spread = math.sqrt(max(0.0, step @ covariance @ step))
        return cost * math.exp(step @ slopes - spread)

    def _posterior(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._features:
            return self._slopes, np.linalg.inv(self._precision)
        features, logs = np.stack(self._features), np.asarray(self._logs)
        features, logs = features - features.mean(axis=0), logs - logs.mean()  # whatever the level is
        covariance = np.linalg.inv(self._precision + features.T @ features / self._noise**2)
        seen = self._precision @ self._slopes + features.T @ logs / self._noise**2
        return covariance @ seen, covariance
