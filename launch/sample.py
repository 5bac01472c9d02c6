"""Sample images from a trained flow, or interpolate between held-out images in its latent space.

    plimsoll sample --workdir=runs/digits-glow --output=samples.png --temperature=0.7
    plimsoll sample --workdir=runs/digits-glow --output=between.png --interpolate=8

The picture contains --num images: samples, or rows of --interpolate images between pairs of held-out ones.
"""

import math
import sys
from pathlib import Path

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import cli, weights

_TEMPERATURE = 0.7
# All images are drawn at once.
_MOST_IMAGES = 10_000


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once the picture is written."""
    parser = weights.parser("sample", __doc__, hf=False)
    parser.add_argument(
        "--output", required=True, metavar="FILE.png", help="picture to write; replaces an existing file"
    )
    parser.add_argument("--num", type=int, default=64, metavar="N", help="number of images; default 64")
    parser.add_argument(
        "--temperature", type=float, help=f"standard deviation of the latents of samples; default {_TEMPERATURE}"
    )
    parser.add_argument(
        "--interpolate", type=int, metavar="K", help="interpolate in rows of K images between pairs of held-out images"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the samples, or of the choice of held-out images; default 0"
    )
    args, overrides = weights.parse(parser, argv)
    output = Path(args.output).expanduser()
    steps = args.interpolate
    if output.suffix != ".png" or not output.absolute().parent.is_dir():
        raise cli.UsageError(f"--output={args.output}: expected a .png file in an existing folder")
    cli.check_output("output", args.output)
    if not 1 <= args.num <= _MOST_IMAGES:
        raise cli.UsageError(f"--num={args.num}: expected 1 to {_MOST_IMAGES:,}")
    if args.temperature is not None and steps is not None:
        raise cli.UsageError("--temperature changes samples only; --interpolate starts from held-out images")
    temperature = _TEMPERATURE if args.temperature is None else args.temperature
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise cli.UsageError(f"--temperature={temperature}: expected a finite number of at least 0")
    # A JAX key has a 32-bit seed.
    if not 0 <= args.seed < 2**32:
        raise cli.UsageError(f"--seed={args.seed}: expected 0 to 2^32 - 1")
    if steps is not None and not 2 <= steps <= args.num:
        raise cli.UsageError(f"--interpolate={steps}: expected 2 to --num={args.num} images per row")

    # Imported late, so that a mistake on the command line shows immediately.
    import numpy as np

    from plimsoll.extras.flows.image_sampler import ImageSampler
    from plimsoll.framework.metrics.image_grid import save_grid

    loaded = weights.load(args, overrides, text=False)
    data = loaded.experiment.data
    images = ImageSampler(loaded.program, loaded.state, averaged=loaded.averaged)
    if steps is None:
        pictures = images.sample(args.num, temperature, args.seed)
    else:
        data.setup(loaded.folder)
        # Use the first validation set; an empty array if there is none.
        held_out = next((data.images[name] for name in data.validation_names), np.zeros(0))
        rows = args.num // steps
        # Each row interpolates from one held-out image to another.
        num_ends = 2 * rows
        if len(held_out) < num_ends:
            raise ValueError(
                f"--interpolate: {rows} rows need {num_ends} held-out images, but data.validation has {len(held_out)}"
            )
        order = np.random.default_rng(args.seed).permutation(len(held_out))
        ends = held_out[order[:num_ends]]
        pictures = images.between(ends[:rows], ends[rows:], steps)
    print(save_grid(pictures, output, levels=data.levels, columns=steps))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
