"""What may be asked of the server: OpenAI's fields as far as they can take effect, and the extras for depth.

A field that is known but cannot take effect is accepted at the value that changes nothing, and refused at any other.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from looplm.inference.sampling import SEED_LIMIT, SamplingParams
from looplm.strict import nearest

MOST_SAMPLES = 128
MOST_STOPS, LONGEST_STOP = 16, 256
"""Every token is searched for stop strings, as far back as the longest reaches."""
MOST_FIELDS, MOST_MESSAGES = 64, 4096
"""Of an object, and of a chat. With these, and lists that are given up at their first mistake, a body of two million
bytes is refused in a moment and not after a list of its hundred thousand mistakes."""
DEFAULT_TOKENS, DEFAULT_CHAT_TOKENS = 16, 1024
"""`max_tokens` when it is left out: OpenAI's 16 for texts; in a chat what the context has room for, at most this."""

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """Types are taken as they are (no "5" for 5), unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MOST_FIELDS:
            raise ValueError(f"{len(data)} fields are more than the {MOST_FIELDS} that an object may have")
        return data


class StreamOptions(Body):
    """What a stream carries beside its text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Generation(Body):
    """What completions and chats have in common."""

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_LIMIT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Extras for depth; at most one of the first four.
    num_loops: Annotated[int, Field(ge=1)] | None = None
    exit_threshold: Annotated[float, Field(ge=0)] | None = None
    exit: Annotated[str, Field(max_length=64)] | None = None
    """hidden-diff:EPS, kl:NATS, stable:LOOPS or deadline:MILLISECONDS, as `looplm generate --exit`."""
    deadline_ms: Annotated[float, Field(ge=0)] | None = None
    """A token leaves when another loop would end more than so many milliseconds after it was begun."""
    draft_loops: Annotated[int, Field(ge=1)] | None = None
    draft_tokens: Annotated[int, Field(ge=1, le=64)] | None = None
    return_depths: bool = False
    """Whether choices carry their tokens, the loop of each, and what was computed for them."""

    # Extras for sampling.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=64)] | None = None
    ignore_eos: bool = False

    # Known to OpenAI's clients, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("presence_penalty", "frequency_penalty")
    @classmethod
    def _no_penalty(cls, value: float | None) -> float | None:
        if value:
            raise ValueError("is not supported here; leave it at 0, or use repetition_penalty")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _no_bias(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported here; leave it out")
        return value

    @model_validator(mode="after")
    def _go_together(self) -> "Generation":
        depth = ("num_loops", "exit_threshold", "exit", "deadline_ms")
        given = [name for name in depth if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say when a token leaves; give one of them")
        if self.draft_tokens is not None and self.draft_loops is None:
            raise ValueError("draft_tokens is how many tokens draft_loops drafts; give both, or neither")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; set stream to true, or leave it out")
        if self.top and self.draft_loops is not None:
            raise ValueError("alternatives of drafted tokens are not known; leave out draft_loops, or ask for none")
        return self

    @property
    @abstractmethod
    def scored(self) -> bool:
        """Whether the log-probabilities of tokens are asked for."""

    @property
    @abstractmethod
    def top(self) -> int:
        """How many alternatives are asked for at each token."""

    def sampling(self, max_tokens: int) -> SamplingParams:
        """As the engine takes it; OpenAI's defaults where nothing is said (temperature 1). Raises UserError."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            n=self.n or 1,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=self.scored,
        )


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the tokens, with so many alternatives."""
    best_of: int | None = None
    suffix: None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_message(cls, value: Any, handler: Any) -> Any:
        """One plain message in place of one for each form that `prompt` may have."""
        try:
            prompt = handler(value)
        except ValueError:
            raise ValueError(
                "must be a string, a list of strings, a list of token ids, or a list of such lists"
            ) from None
        if not prompt:
            raise ValueError("is empty; give at least one token")
        return prompt

    @model_validator(mode="after")
    def _completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported; leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 gives no text; set echo to true, or ask for at least one token")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt, text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of tokens are asked for."""
        return self.logprobs is not None

    @property
    def top(self) -> int:
        """How many alternatives are asked for at each token."""
        return self.logprobs or 0


class TextPart(Body):
    """A piece of a message. Only text: the model reads nothing else."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": role, "content": content}


class TextFormat(Body):
    """The one format there is."""

    type: Literal["text"]


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is the old name of max_completion_tokens; give one of them")
        if self.max_tokens == 0:
            raise ValueError("max_tokens 0 gives no text; ask for at least one token")
        return self

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of tokens are asked for."""
        return bool(self.logprobs)

    @property
    def top(self) -> int:
        """How many alternatives are asked for at each token."""
        return self.top_logprobs or 0


class LoopsRequest(Body):
    """`POST /v1/loops`: what every loop says of a text."""

    model: str
    prompt: str | Annotated[list[int], Field(fail_fast=True)]
    start: Annotated[int, Field(ge=0)] = 0
    """The first token to tell of; the one before it is what it is predicted from."""
    top: Annotated[int, Field(ge=1, le=20)] = 5
    """The likeliest tokens of each loop."""
    num_loops: Annotated[int, Field(ge=1)] | None = None


def first_problem(fields: Sequence[str], errors: Sequence[Any]) -> tuple[str, str | None]:
    """One sentence on what is wrong with a request, from pydantic's list, and the field it is about.

    A field of several forms has an error for each of them; the one that got furthest says most.
    """
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    error = max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    path = [str(part) for part in error["loc"] if part != "body"]
    kind, message = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return f"The body is not valid JSON: {error.get('ctx', {}).get('error', message)}.", None
    if not path and kind != "value_error":
        return "The body must be a JSON object, sent as content-type application/json.", None
    if not path:
        return f"{message}.", None
    # pydantic names the form it has tried (`list[...]`, `str`) as a step on the way.
    param = ".".join(key for key in path if key.isidentifier() and key not in ("str", "int") or key.isdigit()) or None
    if kind == "extra_forbidden":
        near = nearest(path[-1], fields) if len(path) == 1 else None
        hint = f" Did you mean {near}?" if near else ""
        return f"Unknown field {path[-1][:64]!r}: it is not supported here.{hint}", param
    if kind == "missing":
        return f"{param} is missing.", param
    if kind == "value_error":
        return f"{param} {message}.", param
    return f"{param or repr(path[-1][:64])}: {message[:1].lower()}{message[1:]}.", param
