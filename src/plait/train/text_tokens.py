"""Records into tokens, and which of the tokens are learned."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from plait.layout import checks
from plait.train.text import Problems, Record

ROLES = ("system", "user", "assistant", "tool")
_AT_ONCE = 256
_MARKS_ANSWERS = re.compile(r"{%-?\s*generation\b")


@dataclass(frozen=True)
class Tokens:
    """One document.

    Attributes:
        ids: Token ids.
        learned: Which of them are labels; None: all.
    """

    ids: list[int]
    learned: list[int] | None = None


class _Unfit(ValueError):
    """A record that cannot be made tokens; the message names the field."""


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of records.

    Args:
        tokenizer: The model's.
        learn: "answers": of prompts and chats only the completion and the assistant's turns; "all".
        fields: Names of fields in the files, by the names that plait knows.
        end_token: End a document with the tokenizer's end token, if it isn't there.
    """

    tokenizer: Any
    learn: str
    fields: dict[str, str]
    end_token: bool

    def encode(self, records: Iterable[Record], problems: Problems) -> Iterator[Tokens]:
        """The documents of records, in order; those without a token are left out.

        Args:
            records: From [`plait.train.text.read`][plait.train.text.read].
            problems: Takes records that do not fit.
        """
        waiting = iter(records)
        while group := list(islice(waiting, _AT_ONCE)):
            texts = [self._text(record) for record in group]
            plain = self._ids([text for text in texts if text is not None], special=True)
            batch = iter(plain)
            for record, text in zip(group, texts, strict=True):
                try:
                    made = (
                        Tokens(self._ended(next(batch)))
                        if text is not None
                        else self._special(record.fields)
                    )
                except _Unfit as error:
                    problems.add(f"{record.place}: {error}")
                    continue
                if made.ids:
                    yield made

    def _text(self, record: Record) -> str | None:
        """The text of a record that is one plain text and nothing else."""
        text = record.fields.get(self._name("text"))
        return text if isinstance(text, str) else None

    def _special(self, fields: dict[str, Any]) -> Tokens:
        """A record with other fields than `text`."""
        messages, prompt = self._name("messages"), self._name("prompt")
        completion = self._name("completion")
        if messages in fields:
            return self._chat(fields[messages], messages)
        if prompt in fields or completion in fields:
            return self._answer(self._string(fields, prompt), self._string(fields, completion))
        if self._name("text") in fields:
            self._string(fields, self._name("text"))
        known = [self._name(name) for name in ("text", "prompt", "completion", "messages")]
        near = [f"{name}{checks.nearest(name, known)}" for name in fields]
        raise _Unfit(
            f"it has none of the fields {known[0]}; {known[1]} and {known[2]}; {known[3]}. "
            f"It has {', '.join(near) or 'nothing'}"
        )

    def _answer(self, prompt: str, completion: str) -> Tokens:
        """A prompt, as it stands when the model is asked, and what it is to answer."""
        (before,) = self._ids([prompt], special=True)
        end = self.tokenizer.eos_token_id
        if before and before[-1] == end and len(before) > 1:
            before = before[:-1]  # a tokenizer that ends every text by itself
        (after,) = self._ids([completion], special=False)
        after = self._ended(after)
        if self.learn == "all":
            return Tokens(before + after)
        return Tokens(before + after, [0] * len(before) + [1] * len(after))

    def _chat(self, messages: Any, name: str) -> Tokens:
        """A conversation in the model's chat format."""
        _check_messages(messages, name)
        template = getattr(self.tokenizer, "chat_template", None)
        if template is None:
            raise _Unfit(f"{name}: the tokenizer has no chat template")
        try:
            if self.learn == "all":
                ids = self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
                return Tokens(list(ids))
            if isinstance(template, str) and _MARKS_ANSWERS.search(template):
                made = self.tokenizer.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True
                )
                return Tokens(list(made["input_ids"]), list(made["assistant_masks"]))
            return self._by_prefixes(messages, name)
        except _Unfit:
            raise
        except Exception as error:  # templates raise what they like
            raise _Unfit(f"{name}: the chat template refuses it: {error}") from None

    def _by_prefixes(self, messages: list[dict[str, Any]], name: str) -> Tokens:
        """A template that doesn't mark answers: they are what each assistant's turn adds."""
        whole = self._rendered(messages)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:number], add_generation_prompt=True)
            after = self._rendered(messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise _Unfit(
                    f"{name}: the chat template changes earlier turns, so where the answer of turn "
                    f"{number + 1} begins cannot be told; data.learn: all learns every token"
                )
            # What templates put after the end of a turn is never generated.
            answers.append((len(before), len(after.rstrip())))
        encoded = self.tokenizer(
            whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        learned = [
            int(any(start <= first < stop for start, stop in answers))
            for first, _ in encoded["offset_mapping"]
        ]
        return Tokens(list(encoded["input_ids"]), learned)

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        if not messages:
            return ""
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _ids(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        if not texts:
            return []
        made = self.tokenizer(list(texts), add_special_tokens=special, verbose=False)
        return [list(ids) for ids in made["input_ids"]]

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        missing = self.end_token and end is not None and ids and ids[-1] != end
        return [*ids, end] if missing else ids

    def _name(self, field: str) -> str:
        return self.fields.get(field, field)

    def _string(self, fields: dict[str, Any], name: str) -> str:
        if name not in fields:
            raise _Unfit(f"it has no field {name}; it has {', '.join(fields)}")
        if not isinstance(fields[name], str):
            raise _Unfit(f"{name} must be a text, got {type(fields[name]).__name__}")
        return str(fields[name])


def _check_messages(messages: Any, name: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise _Unfit(f"{name} must be a list of turns, got {messages!r:.60}")
    for number, turn in enumerate(messages, 1):
        if not isinstance(turn, dict) or turn.get("role") not in ROLES:
            role = turn.get("role") if isinstance(turn, dict) else turn
            raise _Unfit(f"{name}, turn {number}: the role {role!r} is none of {', '.join(ROLES)}")
        if not isinstance(turn.get("content"), str):
            raise _Unfit(f"{name}, turn {number}: content must be a text")
