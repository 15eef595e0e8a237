"""The methods of explanation by name."""

from vitkit.explaining.methods import METHODS as METHODS
