"""Commands that serve checkpoints over HTTP: ``browse``, pages to look at; ``serve``, their bytes."""

from __future__ import annotations

from typing import Any

import click

from .parts import CHECKPOINT, JSON, MISSING, each, examples, print_json

_LISTENING = (
    click.option(
        "--host", default="127.0.0.1", show_default=True, help="Where to listen. Beyond loopback a token is asked for."
    ),
    click.option("--port", default=0, type=click.IntRange(0, 65535), help="0, the default, takes a free one."),
    click.option("--token", metavar="TEXT", help="Ask for this token, on loopback as well."),
)


def _until_interrupted(server: Any) -> None:
    try:
        server.run()
    except KeyboardInterrupt:
        click.echo("")
    finally:
        server.close()


@click.command(
    epilog=examples(
        "meshtape browse run/checkpoints",
        "meshtape browse before.safetensors after.safetensors --open",
        "meshtape browse s3://bucket/run --host 0.0.0.0 --port 8080",
        "ssh -L 8080:localhost:8080 cluster meshtape browse run --port 8080",
        "meshtape browse run/checkpoints/step-00000264 --json",
    )
)
@click.argument("paths", nargs=-1, required=True, type=CHECKPOINT, metavar="PATH_OR_URL…")
@each(_LISTENING)
@click.option("--open", "open_", is_flag=True, help="Open the page in the default web browser.")
@JSON
def browse(paths: tuple[str, ...], host: str, port: int, token: str | None, open_: bool, as_json: bool) -> None:
    """Look at checkpoints with a web browser.

    Serves checkpoints, runs, or directories of them, until Ctrl-C.

    Shows the tree of arrays, where the bytes are, values as heat maps, distributions, blocks over the ranks, chunks and
    their checksums, the health of the whole, comparisons, and a run's metrics. Reads only the bytes that a page shows.
    Nothing outside the given paths can be reached, nothing is changed, and no page loads anything from elsewhere. With
    --json, prints what the first page of each path shows, and ends.
    """
    import webbrowser

    from meshtape.storage.browse import Server
    from meshtape.storage.browse.model.site import Site
    from meshtape.storage.browse.views.view_places import summary

    from .tables import write_text

    if as_json:
        site = Site(paths)
        print_json([summary(site, place.at) for place in site.places()])
        site.close()
        return
    server = Server(paths, host=host, port=port, token=token)
    try:
        # Opened before the address is printed: what cannot be shown is said here, and the first page is there at once.
        for place in server.site.places():
            server.site.check(place)
    except BaseException:
        server.close()
        raise
    write_text(f"{server.url}\nServing {', '.join(p.path for p in server.site.places())}. Ctrl-C ends it.")
    if open_:
        webbrowser.open(server.url)
    _until_interrupted(server)


@click.command(
    epilog=examples(
        "meshtape serve run/step-00000264 --port 8080", "meshtape serve model.safetensors --host 0.0.0.0 --port 8080"
    )
)
@click.argument("path", type=CHECKPOINT, metavar="PATH_OR_URL")
@each(_LISTENING)
@click.option(
    "--follow",
    is_flag=True,
    help="Open it anew where another takes its place. Clients of Zarr that read meanwhile may have some of each.",
)
@MISSING
@JSON
def serve(path: str, as_json: bool, **options: Any) -> None:
    """Serve the bytes of a checkpoint over HTTP, as safetensors and as Zarr.

    Below the printed address, safetensors/ is a directory as Hugging Face has them, and zarr/ a Zarr v3 hierarchy,
    whatever the kind of the checkpoint. Readers of either ask for the ranges that they need. Nothing is copied to a
    disk, nothing is changed, and nothing but this checkpoint can be reached. Once it was replaced, requests are
    answered by 409. Ends with Ctrl-C. With --json, prints the addresses as JSON and serves all the same.
    """
    from meshtape.storage.serving.server import CheckpointServer

    from .tables import write_text

    server = CheckpointServer(path, **options)
    if as_json:
        places = {"safetensors": f"{server.url}safetensors/", "zarr": f"{server.url}zarr/"}
        print_json(places | {"path": server.source.path, "skipped": server.source.skipped})
    else:
        lost = f"{server.source.lost}\n" if server.source.lost else ""
        write_text(f"{server.url}safetensors/\n{server.url}zarr/\n{lost}Serving {server.source.path}. Ctrl-C ends it.")
    _until_interrupted(server)
