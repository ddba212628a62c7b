"""Marks on modules that shall be fetched as a whole: taken, checked, and not needed.

An engine fetches what is used when it is used, in any order, so that nothing hangs where experts
are chosen by the data. The marks only remember what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from infinity.errors import ConfigError

_MARK = "_z3_leaf"
Classes = Sequence[type[nn.Module] | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Never: parameters do not know their modules."""
    return False


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark back."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules in a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by class, or by a class's name; returns them.

    Raises `ConfigError` if there are none.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take marks back by class; as `set_z3_leaf_modules`."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their dotted names; as `set_z3_leaf_modules`."""
    return _mark_names(model, module_names, True, raise_if_not_found)


def unset_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take marks back by dotted names; as `set_z3_leaf_modules`."""
    return _mark_names(model, module_names, False, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by how their dotted names end; as `set_z3_leaf_modules`."""
    return _mark_suffixes(model, module_name_suffixes, True, raise_if_not_found)


def unset_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take marks back by how names end; as `set_z3_leaf_modules`."""
    return _mark_suffixes(model, module_name_suffixes, False, raise_if_not_found)


def _mark_classes(model: nn.Module, wanted: Classes, flag: bool, must_be: bool) -> list[nn.Module]:
    if isinstance(wanted, str | type) or not all(isinstance(one, str | type) for one in wanted):
        raise ConfigError(f"leaf_module_classes is {wanted!r}", remedy="a list of classes or names")

    def fits(name: str, module: nn.Module) -> bool:
        kind = type(module)
        return any(
            one in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
            if isinstance(one, str)
            else isinstance(module, one)
            for one in wanted
        )

    return _mark(model, fits, wanted, flag, must_be)


def _mark_names(
    model: nn.Module, wanted: Sequence[str], flag: bool, must_be: bool
) -> list[nn.Module]:
    return _mark(model, lambda name, module: name in wanted, wanted, flag, must_be)


def _mark_suffixes(
    model: nn.Module, wanted: Sequence[str], flag: bool, must_be: bool
) -> list[nn.Module]:
    return _mark(model, lambda name, module: name.endswith(tuple(wanted)), wanted, flag, must_be)


def _mark(
    model: nn.Module,
    fits: Callable[[str, nn.Module], bool],
    wanted: Classes,
    flag: bool,
    must_be: bool,
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if must_be and not found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"no module is one of {', '.join(map(str, wanted))}",
            remedy=f"this model has {', '.join(kinds)}; no mark is needed here at all",
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
