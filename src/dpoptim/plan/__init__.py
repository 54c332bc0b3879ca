"""Plans: everything that is decided before a run, and the guarantee that follows."""

from dpoptim.plan.plan import Plan, make_plan, require_plan

__all__ = ["Plan", "make_plan", "require_plan"]
