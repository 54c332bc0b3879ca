"""Whole-run algorithms for empirical and population risk."""

from dpoptim.solvers.accelerated_srgd import SRGDResult, accelerated_srgd
from dpoptim.solvers.adaptive_gd import adaptive_gd, select_stationary
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.constraints import Ball, Box, Constraint, Everywhere
from dpoptim.solvers.kl_spider import kl_spider
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.momentum_gd import momentum_gd
from dpoptim.solvers.noisy_gd import noisy_gd
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.problem import LinearProblem, ModuleProblem, Problem
from dpoptim.solvers.proximal_point import proximal_point
from dpoptim.solvers.releases import Result, Step
from dpoptim.solvers.srgd_settings import SRGD, suggested_settings, theorem_settings

__all__ = [
    "SRGD",
    "Ball",
    "Box",
    "Budget",
    "Constraint",
    "Everywhere",
    "LinearModel",
    "LinearProblem",
    "ModuleProblem",
    "Objective",
    "Problem",
    "Result",
    "SRGDResult",
    "Step",
    "accelerated_srgd",
    "adaptive_gd",
    "kl_spider",
    "momentum_gd",
    "noisy_gd",
    "proximal_point",
    "select_stationary",
    "suggested_settings",
    "theorem_settings",
]
