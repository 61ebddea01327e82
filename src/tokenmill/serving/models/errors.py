"""Define the errors of a server of several models; all others that clients see come from the models' own servers."""

from __future__ import annotations

from tokenmill.core.errors import InvalidRequest, TokenMillError, Unavailable
from tokenmill.serving.server.http.errors import Forbidden


class ModelForbidden(Forbidden):
    """The request's API key may not use the model."""

    code = "model_forbidden"


class ModelTooLarge(InvalidRequest):
    """The model takes more memory than there can ever be for it."""

    code = "model_too_large"


class ModelFailed(Unavailable):
    """The model's server did not start, or has died too often."""

    type = "model_failed"


class ModelNotLoaded(Unavailable):
    """The model was unloaded while the request waited, or did not get its turn in time."""

    type = "model_not_loaded"


class ModelDied(TokenMillError):
    """The model's server died while it answered."""

    status = 502
    type = "model_died"
