"""Reasons why an attack has no result, or why results do not decide whether an arm leaks.

This module does not import PyTorch, so that tables can be read without it.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reason in the column `reason` of tables, and in findings."""

    # of an attack on an update
    ENCRYPTED = "encrypted"
    """The update is encrypted."""
    MASKED = "masked"
    """The update is masked."""
    UNDECLARED = "undeclared"
    """A defence does not declare its effect, so a search cannot be compared with the true samples."""
    DECLARATION_WRONG = "declaration_wrong"
    """A defence does something else than it declares."""
    DECLARATION_NOT_TESTED = "declaration_not_tested"
    """The declaration of a defence could not be tested against its code."""
    BUFFERS_NOT_SOLVED = "buffers_not_solved"
    """The returned buffers could determine the samples, but the attack found no samples that fit."""

    # of a finding on an arm and batch size
    CLOSER_TO_ANOTHER_SAMPLE = "closer_to_another_sample"
    """A reconstruction reaches the threshold, but is closer to another sample."""
    PUBLIC_SAMPLE_AS_CLOSE = "public_sample_as_close"
    """A reconstruction reaches the threshold, but a public sample is as close."""
    TOKENS_IN_ANOTHER_ORDER = "tokens_in_another_order"
    """All tokens of a text were recovered, in another order."""
    NOT_CONVERGED = "not_converged"
    """Without a defence, no reconstruction has the observed gradient."""
    FEW_SAMPLES_FIT = "few_samples_fit"
    """The search found another sample with the observed gradient, and few samples have this gradient."""
    NOT_COMPARED = "not_compared"
    """Without a defence, no reconstruction could be compared with the update."""
    ADAPTIVE_NOT_CONVERGED = "adaptive_not_converged"
    """No reconstruction of an adaptive attack explains the update as well as the original does."""
    ADAPTIVE_NOT_COMPARED = "adaptive_not_compared"
    """No reconstruction of an adaptive attack could be compared with the update."""
    NO_ADAPTIVE_ATTACK = "no_adaptive_attack"
    """No adaptive attack returned a result for every sample."""
    NO_ADAPTIVE_ATTACK_WORKS = "no_adaptive_attack_works"
    """No adaptive attack that was run on the arm succeeds without a defence."""
    NO_UNDEFENDED_ARM = "no_undefended_arm"
    """No arm without a defence was attacked."""
    NOTHING_LEAKS_UNDEFENDED = "nothing_leaks_undefended"
    """The attacks reconstructed nothing without a defence either."""
    DEFENCES_UNKNOWN = "defences_unknown"
    """The attackers of a replay do not know the defences of the federation."""
    NO_RECONSTRUCTION_ATTACK = "no_reconstruction_attack"
    """No attack that reconstructs samples was run on the arm."""


CHANNELS = frozenset({Reason.ENCRYPTED, Reason.MASKED})
"""Reasons of attacks that could not read an update because of its channel."""
OF_DECLARATION = frozenset({Reason.UNDECLARED, Reason.DECLARATION_WRONG, Reason.DECLARATION_NOT_TESTED})
"""Reasons of attacks on defences whose declarations say nothing, so that nothing but a leak can be measured."""
UNDECIDED = OF_DECLARATION | {Reason.BUFFERS_NOT_SOLVED}
"""Reasons of attacks that leave it open whether another attack leaks more."""
NEAR = frozenset({Reason.CLOSER_TO_ANOTHER_SAMPLE, Reason.PUBLIC_SAMPLE_AS_CLOSE, Reason.TOKENS_IN_ANOTHER_ORDER})
"""Reasons of findings with a reconstruction that reaches the threshold and is no leak."""
NOT_ADAPTIVE = frozenset({Reason.NO_ADAPTIVE_ATTACK, Reason.NO_ADAPTIVE_ATTACK_WORKS})
"""Reasons of arms without a valid adaptive attack."""
