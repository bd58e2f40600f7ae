"""`looplm serve`: an OpenAI-compatible server for one checkpoint, with a page to try it on."""

import math
import re
from typing import Annotated

import typer

from looplm.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SITE = r"\*|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+"
"""An origin as browsers write it: scheme, host and port in small letters, no path; `*` is every site."""


def serve(
    checkpoint: Annotated[
        str, typer.Argument(help="A directory, a hub name, or the checkpoint that ships.")
    ] = "stdlib-small",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOOPLM_API_KEY", help="Refuse requests without this key.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; CHECKPOINT if left out.")
    ] = None,
    kv_cache: Annotated[
        str, typer.Option(help="How keys of several loops are kept: per_loop (exact), fill, last, mean or first.")
    ] = "per_loop",
    max_batch: Annotated[int, typer.Option(min=1, max=65_536, help="Texts that run at one time.")] = 32,
    max_queue: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Texts that may wait; more are refused with 429.")
    ] = 128,
    max_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of prompt and text together.")] = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Limit for keys and values, in 10^9 bytes.")
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, max=1e4, help="Largest request, in 10^6 bytes.")] = 2.0,
    rate_limit: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Most requests a minute of one address.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=1e6, help="Most seconds for an answer, its wait included.")
    ] = 600.0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may call this server; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run: cpu, cuda ...")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp32 ...; that of the file if left out.")
    ] = None,
) -> None:
    """Serve CHECKPOINT over HTTP as OpenAI's API, each request at its own depth. The page at / shows it think.

    Ctrl-C or SIGTERM ends it once running texts are done, after half a minute at most; a second one ends it at once.
    """
    try:
        from looplm.serving.app import create_app
        from looplm.serving.limits import Limits
        from looplm.serving.server import allow_many_connections, build_server, listen, reserve
    except ModuleNotFoundError as error:
        raise UserError(f"Serving needs {error.name}: install it with `pip install 'looplm[serve]'`.") from None
    from looplm.cli.api_key import check_key
    from looplm.cli.generate_options import check_kv_cache
    from looplm.hf.checkpoint import CONFIG, find_checkpoint, read_config
    from looplm.hf.load import check_device, check_dtype, load, load_tokenizer
    from looplm.inference import Engine

    check_key(api_key)
    check_names(host, model_name, cors_origin or [])
    check_numbers({"--memory-gb": memory_gb, "--max-body-mb": max_body_mb, "--timeout": timeout})
    check_kv_cache(kv_cache)
    check_device(device)
    check_dtype(dtype)
    allow_many_connections()
    with reserve(host, port) as listener:
        read_config(find_checkpoint(checkpoint) / CONFIG)  # or the tokenizer would be blamed for a damaged config
        tokenizer = load_tokenizer(checkpoint)
        engine = Engine(
            load(checkpoint, dtype=dtype, device=device),
            tokenizer,
            kv_cache=kv_cache,
            max_batch=max_batch,
            max_len=max_len,
            memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
        )
        open_to_network = host not in LOOPBACK
        limits = Limits(
            api_key=api_key,
            max_body=int(max_body_mb * 1e6),
            request_seconds=timeout,
            requests_per_minute=rate_limit,
            loopback_only=not open_to_network,
        )
        app = create_app(
            engine,
            model_name=model_name or checkpoint,
            limits=limits,
            max_waiting=max_queue,
            cors_origins=tuple(cors_origin or ()),
        )
        if open_to_network and api_key is None:
            typer.echo(f"looplm: warning: {host} is open to the network, and there is no --api-key.", err=True)
        listen(listener)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"
        typer.echo(f"Serving {model_name or checkpoint} at {url}/v1; the page to try it on is {url}/")
        build_server(app).run(sockets=[listener])


def check_numbers(given: dict[str, float | None]) -> None:
    """Raises UserError for what is no number: it is in no range, and outside of none."""
    for option, number in given.items():
        if number is not None and math.isnan(number):
            raise UserError(f"{option} is nan; give a number.")


def check_names(host: str, model_name: str | None, cors_origins: list[str]) -> None:
    """Raises UserError for an address, a model's name or a site that is none."""
    if not host.strip():
        raise UserError("--host is empty; give an address to listen at, 0.0.0.0 for all of this machine's.")
    if model_name is not None and not model_name.strip():
        raise UserError("--model-name is empty; give a name, or leave the option out.")
    for site in cors_origins:
        if not re.fullmatch(SITE, site):
            raise UserError(
                f"--cors-origin is {site!r}; give a site as browsers name it, such as https://example.org, in small "
                "letters and without a path, or * for every site."
            )
