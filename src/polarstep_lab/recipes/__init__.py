"""Recipes: functions that return the complete config of a run for a method.

A recipe knows its benchmark at one size. :func:`resolve` is what commands call: a recipe by name,
or a recipe file as the tuning command writes it, a method, a seed, overrides, and possibly a
setting varied by an ablation.
"""

from polarstep_lab.recipes import cifar10, nanogpt  # enter their recipes into the list
from polarstep_lab.recipes.recipe import RECIPES, Range, Recipe, find_recipe
from polarstep_lab.recipes.resolve import read_recipe_file, resolve, search_space, tuned

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
