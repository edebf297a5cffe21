# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 the ntk-convert authors
"""Tokenizers for Baichuan-13B and replit-code-v1, each based on the checkpoint's sentencepiece model.

They give the same ids and texts as the checkpoints' own classes do with transformers 4.33, the last release
that can run those classes. They need the sentencepiece package.
"""

import shutil
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AddedToken, PreTrainedTokenizer

from .ntk_config import NtkConfig  # noqa: F401 -- it refuses old releases of transformers

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens missing from the sentencepiece model get the ids after its last one, in this order."""
LISTS = ("additional_special_tokens", "extra_special_tokens")


class NtkSentencePieceTokenizer(PreTrainedTokenizer):
    """Base of both tokenizers: a sentencepiece model for the text between special tokens."""

    model_input_names = ["input_ids", "attention_mask"]
    strips = True
    """Whether a special token given as a plain string absorbs the white space around it."""
    adds = {"bos": False, "eos": False}
    """The special tokens that a sequence gets."""

    def __init__(self, vocab_file: str, sp_model_kwargs: dict[str, Any] | None = None, **kwargs: Any):
        self.vocab_file = vocab_file
        self.sp_model_kwargs = dict(sp_model_kwargs or {})
        # Needed before the base class asks for the vocabulary.
        self.sp_model = sentencepiece.SentencePieceProcessor(model_file=vocab_file, **self.sp_model_kwargs)
        added = dict(kwargs.pop("added_tokens_decoder", None) or {})
        ids = {token.content: index for index, token in added.items()}

        def special(token: str | AddedToken, strips: bool) -> AddedToken:
            """The token with an id and its rules for white space."""
            content = str(token)
            index = ids.setdefault(content, self._index(content, added))
            token = added.get(index, token)
            # Baichuan's files mark it single_word; transformers 4.33 ignored that.
            added[index] = AddedToken(
                content,
                lstrip=token.lstrip if isinstance(token, AddedToken) else strips,
                rstrip=token.rstrip if isinstance(token, AddedToken) else strips,
                normalized=False,
                special=True,
            )
            return added[index]

        if kwargs.get("unk_token") is not None:
            # If the model spells it differently, it is still the same token.
            ids.setdefault(str(kwargs["unk_token"]), self.sp_model.piece_to_id(str(kwargs["unk_token"])))
        for name in NAMED:
            if kwargs.get(name) is not None:
                kwargs[name] = special(kwargs[name], self.strips)
        for name in LISTS:
            if isinstance(kwargs.get(name), list):
                kwargs[name] = [special(token, True) for token in kwargs[name]]
        super().__init__(added_tokens_decoder=added, sp_model_kwargs=self.sp_model_kwargs, **kwargs)

    def _index(self, content: str, added: dict[int, AddedToken]) -> int:
        """The id of a special token: the id of its piece or, if there is none, the next free id."""
        index: int = self.sp_model.piece_to_id(content)
        if self.sp_model.id_to_piece(index) == content:
            return index
        return max([self.vocab_size, *(index + 1 for index in added)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sp_model": self.sp_model.serialized_model_proto()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = sentencepiece.SentencePieceProcessor(
            model_proto=state["sp_model"], **state["sp_model_kwargs"]
        )
        self.__dict__ = {**state, "sp_model": model}

    @property
    def vocab_size(self) -> int:
        """Number of pieces in the sentencepiece model, without added tokens."""
        return len(self.sp_model)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, including added tokens."""
        pieces = {self.sp_model.id_to_piece(index): index for index in range(self.vocab_size)}
        return {**pieces, **self.get_added_vocab()}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        pieces: list[str] = self.sp_model.encode(text, out_type=str)
        return pieces

    def _convert_token_to_id(self, token: str) -> int:
        index: int = self.sp_model.piece_to_id(token)
        return index

    def _convert_id_to_token(self, index: int) -> str:
        piece: str = self.sp_model.id_to_piece(index)
        return piece

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens; tokens outside the sentencepiece model are separated by spaces."""
        added = self.get_added_vocab()
        parts: list[str] = []
        run: list[str] = []
        for token in tokens:
            if added.get(token, 0) < self.vocab_size:
                run.append(token)
                continue
            parts += [self._text(run), token] if run else [token]
            run = []
        return " ".join([*parts, self._text(run)] if run else parts)

    def _text(self, pieces: list[str]) -> str:
        text: str = self.sp_model.decode(pieces)
        return text

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Adds the configured special tokens around one sequence or two."""
        start = [self.bos_token_id] if self.adds["bos"] else []
        end = [self.eos_token_id] if self.adds["eos"] else []
        first = [*start, *token_ids_0, *end]
        return first if token_ids_1 is None else [*first, *start, *token_ids_1, *end]

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 for each special token that ``build_inputs_with_special_tokens`` adds, 0 for other tokens."""
        if already_has_special_tokens:
            mask: list[int] = super().get_special_tokens_mask(
                token_ids_0, token_ids_1, already_has_special_tokens=True
            )
            return mask
        start, end = [1] * self.adds["bos"], [1] * self.adds["eos"]
        first = [*start, *(0 for _ in token_ids_0), *end]
        return first if token_ids_1 is None else [*first, *start, *(0 for _ in token_ids_1), *end]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """0 for the first sequence and its special tokens, 1 for the second."""
        first = len(self.build_inputs_with_special_tokens(token_ids_0))
        whole = len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))
        return [0] * first + [1] * (whole - first)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Writes the sentencepiece model to a folder and returns its path."""
        name = self.vocab_files_names["vocab_file"]
        path = Path(save_directory, f"{filename_prefix}-{name}" if filename_prefix else name)
        source = Path(self.vocab_file)
        if not source.is_file():
            path.write_bytes(self.sp_model.serialized_model_proto())
        elif source.resolve() != path.resolve():
            shutil.copyfile(source, path)
        return (str(path),)


class NtkReplitTokenizer(NtkSentencePieceTokenizer):
    """Tokenizer of replit-code-v1. It adds no special tokens, and decoding drops those in a text."""

    vocab_files_names = {"vocab_file": "spiece.model"}

    def __init__(
        self,
        vocab_file: str,
        eos_token: str | AddedToken | None = "<|endoftext|>",
        unk_token: str | AddedToken | None = "<|unk|>",
        pad_token: str | AddedToken | None = "<|pad|>",
        **kwargs: Any,
    ):
        super().__init__(vocab_file, eos_token=eos_token, unk_token=unk_token, pad_token=pad_token, **kwargs)


class NtkBaichuanTokenizer(NtkSentencePieceTokenizer):
    """Tokenizer of Baichuan-13B and Baichuan2-13B.

    Args:
        vocab_file: the sentencepiece model.
        add_bos_token: whether a sequence starts with bos_token; True by default.
        add_eos_token: whether a sequence ends with eos_token; False by default.
        adds: the two settings again, ``{"bos": ..., "eos": ...}``, because transformers 5 does not save
            the arguments above.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}
    strips = False

    def __init__(
        self,
        vocab_file: str,
        unk_token: str | AddedToken | None = "<unk>",
        bos_token: str | AddedToken | None = "<s>",
        eos_token: str | AddedToken | None = "</s>",
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
        adds: dict[str, bool] | None = None,
        clean_up_tokenization_spaces: bool = False,
        **kwargs: Any,
    ):
        saved = adds or {}
        self.add_bos_token = saved.get("bos", True) if add_bos_token is None else add_bos_token
        self.add_eos_token = saved.get("eos", False) if add_eos_token is None else add_eos_token
        super().__init__(
            vocab_file,
            unk_token=unk_token,
            bos_token=bos_token,
            eos_token=eos_token,
            add_bos_token=self.add_bos_token,
            add_eos_token=self.add_eos_token,
            adds=self.adds,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            **kwargs,
        )

    @property
    def adds(self) -> dict[str, bool]:
        """The special tokens that a sequence gets, in the form that is saved."""
        return {"bos": self.add_bos_token, "eos": self.add_eos_token}

    def _text(self, pieces: list[str]) -> str:
        # Special tokens keep their text. As in the original code, the space goes before the text that
        # precedes a special token, not between the two.
        special = set(self.all_special_tokens)
        text = ""
        run: list[str] = []
        after_special = False
        for position, piece in enumerate(pieces):
            if piece not in special:
                run.append(piece)
                after_special = False
                continue
            space = " " if position and not after_special else ""
            text += space + super()._text(run) + piece
            run = []
            after_special = True
        return text + super()._text(run)
