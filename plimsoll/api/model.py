"""`load`: a trained or published model for use from Python: generation, chat, scoring and export."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from plimsoll.api import chats, loaded
from plimsoll.api.chats import Conversation, history_from_messages
from plimsoll.api.configs import log, override
from plimsoll.api.export import export
from plimsoll.api.loaded import LoadedModel
from plimsoll.framework.data.pretrained_tokenizer import Message
from plimsoll.framework.files.text_files import read_text
from plimsoll.framework.inference.generation import Generator, stream_text
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.inference.scoring import Scorer, TextScore
from plimsoll.framework.terminal.phase_views import show_phases_on_terminal

DEFAULT_TOKENS = 128


class Model:
    """A language model loaded onto the devices.

    Args:
        loaded: weights and tokenizer of the model.
        batch_size: number of rows to score at a time.
    """

    def __init__(self, loaded: LoadedModel, *, batch_size: int = 8):
        self.loaded = loaded
        self._batch_size = batch_size

    def __repr__(self) -> str:
        return f"Model({str(self.loaded.folder)!r})"

    @functools.cached_property
    def generator(self) -> Generator:
        """The generator, which keeps its compiled programs."""
        return Generator(self.loaded.program, self.loaded.state, averaged=self.loaded.averaged)

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer, which keeps its compiled programs."""
        loaded = self.loaded
        return Scorer(loaded.program, loaded.state, averaged=loaded.averaged, batch_size=self._batch_size)

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """Generate a continuation of a prompt; returns the new text without the prompt.

        Args:
            prompt: text to continue.
            max_new_tokens: maximum number of new tokens; None for 128, or fewer if the model has too few positions.
            temperature: divisor of the logits; 0 selects the most likely token.
            top_k: sample only from the k most likely tokens; None for all.
            top_p: sample only from the most likely tokens whose probabilities add up to this.
            stop: string or strings that end the continuation; they are not part of it.
            seed: random seed.

        Raises:
            ValueError: a setting is out of range, the prompt is empty or too long, or the model has no tokenizer.
        """
        stops = [stop] if isinstance(stop, str) else stop
        max_tokens = DEFAULT_TOKENS if max_new_tokens is None else max_new_tokens
        sampling = Sampling(max_tokens, temperature, top_k, top_p, seed=seed)
        # Only the default may be reduced: an explicit number that does not fit is an error.
        chunks = self.stream([prompt], sampling, stops, clamp_max_tokens=max_new_tokens is None)
        return "".join(chunk for (chunk,) in chunks)

    def stream(
        self, texts: Sequence[str], sampling: Sampling, stops: Sequence[str] = (), *, clamp_max_tokens: bool = False
    ) -> Iterator[list[str]]:
        """Yield the new text of each prompt, step by step. Errors are raised by this call, not at the first step.

        Args:
            texts: prompts, continued as one batch.
            sampling: sampling settings; the tokenizer's stop ids end a text in addition to `sampling.stop_ids`.
            stops: strings that end a continuation; they are not part of it.
            clamp_max_tokens: reduce the number of new tokens to fit the model's maximum positions, instead of raising
                an error.
        """
        tokenizer = self.loaded.tokenizer
        prompts = [tokenizer.encode_prompt(text) for text in texts]
        if not all(prompts):
            raise ValueError("a prompt is empty, and this tokenizer has no token that starts a text")
        max_tokens = sampling.max_new_tokens
        max_positions = self.loaded.experiment.language_model.max_positions
        if clamp_max_tokens and max_positions is not None:
            longest_prompt = max(map(len, prompts))
            max_tokens = max(1, min(max_tokens, max_positions - longest_prompt))
        stop_ids = {*tokenizer.stop_ids, *sampling.stop_ids}
        full_sampling = replace(sampling, max_new_tokens=max_tokens, stop_ids=tuple(sorted(stop_ids)))
        # `stream_text` is a generator function, so its own check would only run at the first step.
        self.generator.check(prompts, full_sampling)
        return stream_text(self.generator, tokenizer, prompts, full_sampling, stops)

    def chat(
        self,
        messages: Sequence[Message] = (),
        *,
        system: str | None = None,
        num_samples: int = 1,
        max_new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Conversation:
        """Start a conversation: `say(text)` returns the answer, `stream(text)` yields it in chunks.

        The model's own chat template is used. A model without one continues a plain transcript, which is reported.

        Args:
            messages: earlier messages, alternating {"role": "user" or "assistant", "content": text}; the first one may
                have the role "system".
            system: system prompt; None for none.
            num_samples: number of answers to each message, all in `samples`; the conversation continues from the first.
            max_new_tokens: maximum length of each answer; None for 512, but at most half the context.
            temperature, top_k, top_p: as for `generate`.
            seed: random seed of the first answer; each further answer uses the next seed.

        Raises:
            ValueError: a setting or a message is invalid, or the model has no tokenizer.
        """
        history = history_from_messages(messages)
        if history.question is not None:
            raise ValueError("messages: the last message is a question; pass it to say(), or pass them all to answer()")
        if system is not None and history.system is not None:
            raise ValueError("the system prompt is given twice: in messages, and as system")
        max_tokens = chats.DEFAULT_TOKENS if max_new_tokens is None else max_new_tokens
        chat = chats.create_chat(
            self.loaded,
            self.generator,
            Sampling(max_tokens, temperature, top_k, top_p, seed=seed),
            num_samples=num_samples,
            clamp_max_tokens=max_new_tokens is None,
            log=log,
        )
        return Conversation(chat, history.system if system is None else system, history.turns)

    def answer(self, messages: Sequence[Message], **settings: Any) -> str:
        """Return the model's answer to a list of messages that ends with a user message.

        Args:
            messages: as for `chat`.
            **settings: max_new_tokens, temperature, top_k, top_p and seed, as for `chat`.

        Raises:
            ValueError: as for `chat`, or the last message is not a user message.
        """
        question = history_from_messages(messages).question
        if question is None:
            raise ValueError("messages: expected the last one to be the user's")
        return self.chat(messages[:-1], **settings).say(question)

    def score(self, text: str) -> TextScore:
        """Score a text: number of tokens, loss in nats per token, perplexity, bits per byte.

        Raises:
            ValueError: the text is empty, or the model has no tokenizer.
        """
        if not text:
            raise ValueError("the text is empty")
        tokens = self.loaded.tokenizer.encode_document(text)
        return self.scorer.text(tokens, len(text.encode()))

    def evaluate(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> dict[str, TextScore]:
        """Score files of UTF-8 text; returns the scores by path. All files are read before the first is scored.

        Raises:
            ValueError: a file is empty or not UTF-8.
            FileNotFoundError: a file does not exist.
        """
        paths = [files] if isinstance(files, (str, os.PathLike)) else files
        # Read all files first, so that a bad one is reported before any is scored.
        texts = {os.fspath(path): read_text(os.fspath(path)) for path in paths}
        return {path: self.score(text) for path, text in texts.items()}

    def export(self, folder: str | os.PathLike[str], *, adapter: bool = False) -> Path:
        """Write the model as a directory that transformers' from_pretrained loads; returns its path.

        Args:
            folder: output directory; it must not exist yet.
            adapter: write only the LoRA adapters, in the format of peft.

        Raises:
            FileExistsError: the folder exists.
            ValueError: the model does not belong to a family that transformers supports.
        """
        return export(self.loaded, os.fspath(folder), adapter=adapter, log=log).folder


@show_phases_on_terminal()
def load(
    source: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    step: int | Literal["best"] | None = None,
    averaged: bool = False,
    host_weights: bool = False,
) -> Model:
    """Load the model of a run, or a published model, without the optimizer state.

    Args:
        source: workdir of a run or its URL, or hf:DIR with a Hugging Face directory.
        overrides: {dotted path: value} for the config, as for `load_config`.
        step: step of the checkpoint; "best" for the best one (of trainer.keep_best), None for the newest.
        averaged: use the moving averages of the weights.
        host_weights: offload the stack to host memory; the device holds one layer of it at a time.

    Raises:
        FileNotFoundError: there is no run, or it has no checkpoint.
        ConfigError, ValueError: the parts do not fit together.
    """
    path = os.fspath(source)
    kind, _, directory = path.partition(":")
    is_published = kind == "hf" and bool(directory)
    if is_published and (step is not None or averaged):
        raise ValueError(f"{path}: step and averaged require the workdir of a run")
    change = functools.partial(override, overrides=dict(overrides or {}))
    is_mesh_requested = any(loaded.is_mesh_setting(setting) for setting in overrides or {})
    if is_published:
        published = loaded.load_published(
            directory, change, host_weights=host_weights, is_mesh_requested=is_mesh_requested, log=log
        )
        return Model(published)
    run = loaded.load_run(
        path,
        change,
        step=step,
        averaged=averaged,
        host_weights=host_weights,
        is_mesh_requested=is_mesh_requested,
        log=log,
    )
    return Model(run)
