"""Writes docs/reference/recipe.md from the types of a recipe. Run it when a key changes."""

from pathlib import Path

from slipstream.training.recipe_reference import reference_page

PAGE = Path(__file__).parent / "reference" / "recipe.md"

if __name__ == "__main__":
    PAGE.write_text(reference_page(), encoding="utf-8")
