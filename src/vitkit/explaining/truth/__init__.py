"""Tests of heat maps: does a map name the patches that the model really uses?"""
