"""``meshtape serve``: the bytes of a checkpoint over HTTP, as safetensors and as Zarr."""

from __future__ import annotations

import click

from .parts import CHECKPOINT, JSON, examples, print_json


@click.command(
    epilog=examples(
        "meshtape serve run/step-00000264 --port 8080",
        "meshtape serve model.safetensors --host 0.0.0.0 --port 8080",
    )
)
@click.argument("path", type=CHECKPOINT, metavar="PATH_OR_URL")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen. Beyond loopback a token is asked for."
)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="0, the default, takes a free one.")
@click.option("--token", metavar="TEXT", help="Ask for this token, on loopback as well.")
@JSON
def serve(path: str, host: str, port: int, token: str | None, as_json: bool) -> None:
    """Serve the bytes of a checkpoint over HTTP, as safetensors and as Zarr.

    Below the printed address, safetensors/ is a directory as Hugging Face has them, and zarr/ a Zarr v3 hierarchy, whatever the kind of the checkpoint.
    Readers of either ask for the ranges that they need. Nothing is copied to a disk, nothing is changed, and nothing but this checkpoint can be reached.
    Ends with Ctrl-C. With --json, prints the addresses as JSON and serves all the same.
    """
    from meshtape.storage.serving.server import CheckpointServer

    from .tables import write_text

    server = CheckpointServer(path, host=host, port=port, token=token)
    if as_json:
        print_json(
            {"safetensors": f"{server.url}safetensors/", "zarr": f"{server.url}zarr/", "path": server.source.path}
        )
    else:
        write_text(f"{server.url}safetensors/\n{server.url}zarr/\nServing {server.source.path}. Ctrl-C ends it.")
    try:
        server.run()
    except KeyboardInterrupt:
        click.echo("")
    finally:
        server.close()
