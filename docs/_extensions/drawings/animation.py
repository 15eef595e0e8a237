"""The animation: an image becomes patches, a row, and tokens. Without motion all steps are seen."""

from __future__ import annotations

from .shapes import Drawing, grid, note, patch, pixel, token

SECONDS = 12
STEPS = (0, 20, 45, 70)
"""Per cent of the time at which a step begins."""
HOME = [(40, 30), (92, 30), (40, 82), (92, 82)]
"""Where each patch lies in the image."""
APART = [(206, 22), (278, 22), (206, 94), (278, 94)]
IN_ROW = [(96 + 76 * n, 178) for n in range(4)]


def keyframes(name: str, start: tuple[int, int], stops: list[tuple[int, tuple[int, int]]]) -> str:
    """Return the movement of a part: where it is at each step, relative to where it begins.

    It fades where it is and goes back unseen.
    """
    frames = ["0% { transform: translate(0, 0); }"]
    before = (0, 0)
    for percent, (x, y) in stops:
        moved = (x - start[0], y - start[1])
        frames.append(f"{percent}% {{ transform: translate({before[0]}px, {before[1]}px); }}")
        frames.append(f"{percent + 12}% {{ transform: translate({moved[0]}px, {moved[1]}px); }}")
        before = moved
    frames.append(f"96% {{ transform: translate({before[0]}px, {before[1]}px); opacity: 1; }}")
    frames.append(f"98% {{ transform: translate({before[0]}px, {before[1]}px); opacity: 0; }}")
    frames.append("98.1%, 99% { transform: translate(0, 0); opacity: 0; }")
    return f"@keyframes {name} {{ {' '.join(frames)} }}"


def appearing(name: str, percent: int) -> str:
    """Return frames of a part that is invisible until a step."""
    return (
        f"@keyframes {name} {{ 0%, {percent}% {{ opacity: 0; }} "
        f"{percent + 5}%, 96% {{ opacity: 1; }} 98%, 100% {{ opacity: 0; }} }}"
    )


def animation() -> Drawing:
    """An image of four patches on its way to five tokens."""
    rules = [
        appearing("patches-stay", 22), appearing("tokens-appear", 70), appearing("class-appears", 84)
    ]  # fmt: skip
    moving = ""
    for n, home in enumerate(HOME):
        rules.append(keyframes(f"patch-{n}", home, [(10, APART[n]), (40, IN_ROW[n])]))
        rules.append(f".moving-{n} {{ animation: patch-{n} {SECONDS}s ease-in-out infinite; }}")
        moving += f'<g class="moving-{n}">{patch(n, *home, 13)}</g>'
    # Patches stay where they came apart: the end of the motion is the drawing without motion.
    rules.append(f".apart {{ animation: patches-stay {SECONDS}s linear infinite; }}")
    rules.append(f".tokens {{ animation: tokens-appear {SECONDS}s linear infinite; }}")
    rules.append(f".first {{ animation: class-appears {SECONDS}s linear infinite; }}")
    # Without motion the moving parts are gone and every step stands at its place.
    # A reader can stop the motion: with the pointer, or with the keyboard (WCAG 2.2, 2.2.2).
    rules.append(".animation:is(:hover, :focus) g { animation-play-state: paused; }")
    still = [".moving-0, .moving-1, .moving-2, .moving-3 { display: none; }"]
    moves = (
        "@media (prefers-reduced-motion: no-preference) { .row { display: none; } "
        + " ".join(rules)
        + " }"
    )
    rests = "@media (prefers-reduced-motion: reduce) { " + " ".join(still) + " }"
    apart = "".join(patch(n, *APART[n], 13) for n in range(4))
    row = "".join(patch(n, *IN_ROW[n], 13) for n in range(4))
    made = "".join(token(x + 18, 262, "patch") for x, _ in IN_ROW)
    body = (
        f"<style>.whole {{ fill: none; pointer-events: all; }} {moves} {rests}</style>"
        + '<g class="animation" tabindex="0" role="img" aria-label="Focus stops the motion">'
        + '<rect x="0" y="0" width="400" height="334" class="whole"/>'
        + grid(40, 30, 8, 8, 13, pixel) + '<rect x="40" y="30" width="104" height="104" class="edge"/>'
        + note(92, 152, "1. the image") + note(268, 166, "2. its patches")
        + note(236, 246, "3. one row of patches")
        + note(46, 322, "class") + note(236, 322, "4. times E: tokens, each with its position")
        + f'<g class="apart">{apart}</g><g class="row">{row}</g>' + moving  # over the words
        + f'<g class="tokens">{made}</g>'
        + f'<g class="first">{token(38, 262, "class")}</g>'
        + "</g>"
    )  # fmt: skip
    return Drawing(
        "From the image to the tokens, moving",
        "The image of a digit is cut into four patches. The patches move apart, then into one row "
        "in reading order. Each becomes a token, and the class token is put in front.",
        334,
        body,
    )
