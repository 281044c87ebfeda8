"""The settings of a model, as a recipe writes them under `model:`.

What a recipe leaves out is filled in when the config is made, first from the named size, then from
the kind. So a finished config (and its dump in a run or a bundle) holds every number. Touch this
when a model gets another setting.
"""

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from slipstream.models.sizes import SIZES, Size, named_size

Kind = Literal["hstu", "fuxi", "sasrec"]
TimeBias = Literal["own", "next", "none"]
TimeEncoding = Literal["buckets", "functional"]
Task = Literal["retrieval", "ranking"]

_RELATIVE: dict[str, Any] = {"time_bias": "own", "time_buckets": 128, "position_bias": True}
_BY_KIND: dict[str, dict[str, Any]] = {
    "hstu": _RELATIVE,
    "fuxi": _RELATIVE,
    "sasrec": {"time_bias": "none", "time_buckets": 0, "position_bias": False},
}


class ModelConfig(BaseModel):
    """One sequence model: its kind, its size, and how it sees order and time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Field("hstu", description="hstu, fuxi (FuXi-alpha) or sasrec")
    size: Size | None = Field(
        None, description="tiny, small, medium, large or long: fills what is not set here"
    )
    dim: int = Field(64, ge=1, le=16384, description="width of a token and of an embedding row")
    blocks: int = Field(2, ge=1, le=256, description="number of layers")
    heads: int = Field(2, ge=1, le=256, description="attention heads of a layer")
    dqk: int = Field(
        0, ge=0, le=4096, description="width of a query or key of one head; 0: dim / heads"
    )
    dv: int = Field(0, ge=0, le=4096, description="width of a value of one head; 0: dim / heads")
    max_len: int = Field(200, ge=1, le=1_000_000, description="longest history in behaviours")
    dropout: float = Field(
        0.2, ge=0, lt=1, description="dropout after attention and inside feed-forward parts"
    )
    input_dropout: float = Field(
        0.2, ge=0, lt=1, description="dropout on the tokens as they enter the first layer"
    )
    time_buckets: int = Field(
        128, ge=0, le=4096, description="logarithmic buckets of the time bias (buckets)"
    )
    time_encoding: TimeEncoding = Field(
        "buckets",
        description="the time bias: a learned entry per bucket, or functional: a decay "
        "a exp(-b days^c) whose a, b, c a layer learns (hstu, fuxi)",
    )
    time_bias: TimeBias = Field(
        "own",
        description="look back from a token's own time, the next behaviour's, or no time bias",
    )
    position_bias: bool = Field(
        True, description="relative position bias in attention (hstu, fuxi)"
    )
    position_embedding: bool = Field(
        True, description="learned absolute positions, counted from the start, added to the tokens"
    )
    scale_embeddings: bool = Field(
        True, description="multiply embedding rows by sqrt(dim) where they enter"
    )
    divisor: float | None = Field(
        None,
        gt=0,
        description="constant divisor of SiLU attention; empty: the longest token stream",
    )
    scale: float | None = Field(
        None, gt=0, description="factor on q·k; empty: 1 (hstu, fuxi) or 1/sqrt(dqk) (sasrec)"
    )
    ffn_multiplier: float = Field(
        1.0, gt=0, le=64, description="inner width of the feed-forward part over dim (fuxi, sasrec)"
    )
    activation: Literal["relu", "gelu"] = Field(
        "gelu", description="activation of SASRec's feed-forward part"
    )
    head_dim: int = Field(
        64, ge=1, le=4096, description="inner width of each task's small network (ranking)"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_open_settings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind, size = data.get("kind", "hstu"), data.get("size")
        if kind not in list(_BY_KIND) or (size is not None and size not in list(SIZES)):
            return data  # the field's own check has the better sentence
        return _BY_KIND[kind] | (named_size(kind, size) if size is not None else {}) | data

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what earlier versions did not know, so that digests and versions stay."""
        content: dict[str, Any] = dump(self)
        if content.get("time_encoding") == "buckets":
            del content["time_encoding"]
        return content

    @model_validator(mode="after")
    def _settle(self) -> "ModelConfig":
        for name in ("dqk", "dv"):
            if getattr(self, name) == 0:
                if self.dim % self.heads:
                    raise ValueError(
                        f"dim {self.dim} cannot be shared by {self.heads} heads: change one of "
                        f"them or set {name}"
                    )
                object.__setattr__(self, name, self.dim // self.heads)
        if self.kind == "sasrec" and (self.time_bias != "none" or self.position_bias):
            raise ValueError(
                "sasrec has no relative bias: set time_bias to none and position_bias to false, "
                "or leave them out"
            )
        if self.time_encoding == "functional":
            if self.time_bias == "none":
                raise ValueError(
                    "time_encoding functional encodes a time bias, which this model does not have: "
                    "set time_bias to own or next (hstu, fuxi), or leave time_encoding out"
                )
        elif self.time_bias != "none" and self.time_buckets == 0:
            raise ValueError(
                "a time bias needs buckets: set time_buckets to 1 or more, or time_bias to none"
            )
        return self
