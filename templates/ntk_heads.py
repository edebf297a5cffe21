"""What the heads of decoders and encoders have in common, and the two that are the same for both.

A family's modeling file names this file itself, although it also comes with the decoders' or the
encoders': transformers 4.57 loads no more of a local repository than what that file names.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput, TokenClassifierOutput


class Head:
    """Mixin of every head; those of decoders and encoders add ``run_trunk``."""

    def wants_dict(self, return_dict: bool | None) -> bool:
        return self.config.return_dict if return_dict is None else return_dict

    def add_dropout(self, config: Any) -> None:
        """The dropout before a classifier, under whichever name the config has for it."""
        names = ("classifier_dropout", "hidden_dropout", "hidden_dropout_prob")
        rates = (getattr(config, name, None) for name in names)
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))

    def classification_loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of scores [B, labels]; the kind follows ``config.problem_type`` or is chosen by the labels."""
        problem = self.config.problem_type
        if problem is None:
            if self.num_labels == 1:
                problem = "regression"
            else:
                whole = labels.dtype in (torch.long, torch.int)
                problem = "single_label_classification" if whole else "multi_label_classification"
            self.config.problem_type = problem
        if problem == "regression":
            return F.mse_loss(scores.flatten(), labels.flatten())
        if problem == "single_label_classification":
            return F.cross_entropy(scores, labels)
        return F.binary_cross_entropy_with_logits(scores, labels)


class TokenClassificationHead:
    """Scores [B, tokens, labels] of every token."""

    def add_head(self, config: Any) -> None:
        self.add_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> tuple | TokenClassifierOutput:
        """Runs trunk and head; arguments as the trunk's, and ``labels`` [B, tokens] class indices."""
        trunk = self.run_trunk(input_ids, kwargs)
        scores = self.classifier(self.dropout(trunk.last_hidden_state))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(scores.flatten(0, 1), labels.to(scores.device).flatten())
        output = TokenClassifierOutput(
            loss=loss, logits=scores, hidden_states=trunk.hidden_states, attentions=trunk.attentions
        )
        return output if self.wants_dict(return_dict) else output.to_tuple()


class QuestionAnsweringHead:
    """Scores [B, tokens] of every token as the answer's start and as its end."""

    def add_head(self, config: Any) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> tuple | QuestionAnsweringModelOutput:
        """Runs trunk and head; arguments as the trunk's, and:

        Args:
            start_positions, end_positions: [B] token indices of the answer; one beyond the sequence
                means that the row has none and adds nothing to the loss.
        """
        trunk = self.run_trunk(input_ids, kwargs)
        start, end = self.qa_outputs(trunk.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            beyond = start.shape[1]
            first, last = (
                target.to(start.device).reshape(-1).clamp(0, beyond)
                for target in (start_positions, end_positions)
            )
            loss = F.cross_entropy(start, first, ignore_index=beyond)
            loss = (loss + F.cross_entropy(end, last, ignore_index=beyond)) / 2
        output = QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            hidden_states=trunk.hidden_states,
            attentions=trunk.attentions,
        )
        return output if self.wants_dict(return_dict) else output.to_tuple()
