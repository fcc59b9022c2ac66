"""Recipes: functions that return the complete config of a run for a method.

A recipe knows its benchmark at one size. :func:`resolve` is what commands call: a recipe by name,
or a recipe file as the tuning command writes it, a method, a seed, overrides, and possibly a
setting varied by an ablation.
"""

from polarstep.experiments.recipes import cifar10, nanogpt  # enter their recipes into the list
from polarstep.experiments.recipes.recipe import RECIPES, Range, Recipe, find_recipe
from polarstep.experiments.recipes.resolve import read_recipe_file, resolve, search_space, tuned

__all__ = [
    "RECIPES",
    "Range",
    "Recipe",
    "cifar10",
    "find_recipe",
    "nanogpt",
    "read_recipe_file",
    "resolve",
    "search_space",
    "tuned",
]
