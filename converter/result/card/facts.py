"""What the card of a result is written from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converter.config import Weights
from converter.model.alibi import AlibiModel
from converter.model.card_text import CardText
from converter.model.model import Model
from converter.result.card.older import OlderCard
from converter.source.hub import is_hub_id
from converter.source.tokenizer import Tokenizer

if TYPE_CHECKING:
    from converter.verification import Check


@dataclass(frozen=True)
class Origin:
    """The original checkpoint, and the card of the repository that was converted."""

    name: str
    base_model: str | None
    """Its Hub id; None if it is not known."""
    commit: str | None
    older: OlderCard


def read_origin(model: Model, base_model: str | None, older: OlderCard) -> Origin:
    """The origin of a result that is made of ``model``, whose card is the older one.

    ``base_model`` is the Hub id that the user gave. A repository that is converted again has its original in
    its record.
    """
    source, record = model.source, model.origin
    root = record.source or source.root
    if base_model is None:
        if not model.converted:
            base_model = source.repo_id
        elif is_hub_id(root):
            base_model = root
    name = f"{root}/{record.subfolder}" if record.subfolder else root
    return Origin(name, base_model, record.commit, older)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a conversion knows of its result."""

    result: Model
    origin: Origin
    tokenizer: Tokenizer
    sentence_encoder: bool | None
    """Whether sentence-transformers loads the files for it; None if there are none."""
    weights: Weights
    rounded: bool
    """Whether the weights have another dtype than the original's."""
    notes: Sequence[str]
    """Each one sentence without its full stop."""
    place: str
    """The folder or Hub id from which the examples load the model."""
    command: str
    """What made the result, as a shell takes it."""
    checks: Sequence[Check]
    """What the result passed; empty without verification."""
    picture: bool
    """Whether the picture of the scaling was drawn."""

    @property
    def card_text(self) -> CardText:
        return self.result.card_text

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer can be loaded, from the result or from elsewhere."""
        return bool(self.tokenizer.here or self.tokenizer.elsewhere)

    @property
    def may_have_own_weights(self) -> bool:
        """Whether its weights may differ from the original's. The older card then describes this model."""
        return self.weights != "original"

    @property
    def makes_embeddings(self) -> bool:
        """Whether sentence-transformers makes embeddings with it."""
        if self.sentence_encoder is not None:
            return self.sentence_encoder
        # Without files of its own, it takes the mean of an encoder's hidden states.
        return isinstance(self.result, AlibiModel) and self.result.head == "Model" and not self.result.decoder

    @property
    def input_limit(self) -> int | None:
        """The tokens after which programs cut a text; None for decoders, and without a scaling."""
        if self.result.decoder:
            return None
        return self.result.input_limit(self.result.scaling)
