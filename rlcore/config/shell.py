"""The words of a shell script's commands: quotes, continuations, variables, arrays, small sums.

Enough of the shell for scripts that start a training; nothing is executed. What is not followed
(command substitution, variables that are not set, or set under a condition) leaves a mark with the
reason in the word it would be part of; `unknown_in` finds it. Words that nobody needs do no harm.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_BRACES: Final = re.compile(r"(\w+)(?:\[[@*]\])?(?::?-(.*))?", re.DOTALL)
_MARK: Final = re.compile("\ue000(.*?)\ue001")
_OPENING: Final = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSING: Final = frozenset({"fi", "done", "esac", "}"})
_DECLARING: Final = frozenset({"export", "declare", "local", "readonly", "then", "do", "else"})
_BEFORE_COMMANDS: Final = frozenset({"then", "do", "else", "!"})
_ENDS: Final = " \t\n;|&<>()"
_SUMS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left // right,
    ast.Mod: operator.mod,
}

Variables = dict[str, list[str]]


def read_commands(
    text: str, environment: Mapping[str, str], *, has_assignments: bool = True
) -> list[list[str]]:
    """Return the words of every command of a script, with variables put in.

    Args:
        text: The script.
        environment: Variables that are set before it starts.
        has_assignments: Whether `name=value` sets a variable, or is a word like any other.
    """
    variables = {name: [value] for name, value in environment.items()}
    return _Reader(text, variables, has_assignments).commands()


def unknown_in(word: str) -> str | None:
    """Return why a part of `word` is not known, or None where all of it is."""
    found = _MARK.search(word)
    return found[1] if found else None


def _unknown(reason: str) -> str:
    return f"\ue000{reason}\ue001"


class _Reader:
    """One pass over a text."""

    def __init__(self, text: str, variables: Variables, has_assignments: bool = False) -> None:
        self._text = text
        self._variables = variables
        self._has_assignments = has_assignments
        self._position = 0
        self._depth = 0  # of conditions, loops and functions
        self._is_conditional = False  # after && or ||
        self._before: dict[str, list[str] | None] = {}  # what a command's own variables were

    def commands(self) -> list[list[str]]:
        """Return the words of every command that is left."""
        found: list[list[str]] = []
        while self._position < len(self._text):
            words = self._command()
            if words:
                self._depth = max(0, self._depth + _depth_of(words))
                found.append(words)
        return found

    def text(self) -> str:
        """Return the words that are left, in one line."""
        return " ".join(word for words in self.commands() for word in words)

    def _peek(self, length: int = 1) -> str:
        return self._text[self._position : self._position + length]

    def _take(self, length: int = 1) -> str:
        taken = self._peek(length)
        self._position += length
        return taken

    def _take_to(self, end: str) -> str:
        """Return what comes before `end`, and step over both; the rest where there is no end."""
        before, _, _ = self._text[self._position :].partition(end)
        self._position += len(before) + len(end)
        return before

    def _is_skipped(self) -> bool:
        """Step over blanks, continuations and comments; whether there were any."""
        start = self._position
        if self._peek(2) == "\\\n":
            self._take(2)
        elif self._peek() in (" ", "\t"):
            self._take()
        elif self._peek() == "#":
            self._take_to("\n")
            self._position -= 1  # the end of the line ends the command, too
        return self._position > start

    def _command(self) -> list[str]:
        words: list[str] = []
        self._before = {}
        is_conditional_next = False
        while self._position < len(self._text):
            if self._is_skipped():
                continue
            char = self._peek()
            if char in "\n;|&":
                is_conditional_next = self._peek(2) in ("&&", "||")
                self._take(2 if is_conditional_next else 1)
                break
            if char in "<>":
                self._redirection(words)
            elif char in "()":
                self._take()
            else:
                self._assignment_or_word(words)
        # A line may end after && and go on in the next one.
        self._is_conditional = is_conditional_next or (not words and self._is_conditional)
        return words

    def _assignment_or_word(self, words: list[str]) -> None:
        can_assign = self._has_assignments and (
            not words or words[0] in _DECLARING or words[-1] == "{"
        )
        match = _ASSIGNMENT.match(self._text, self._position) if can_assign else None
        if match is None:
            if not words:
                self._take_back_own_variables()
            words += self._word()
            return
        if not words and match[1] not in self._before:
            self._before[match[1]] = self._variables.get(match[1])
        self._position = match.end()
        if self._peek() == "(":
            self._take()
            value = self._array()
        else:
            value = [" ".join(self._word())]
        if match[2]:
            value = [*self._variables.get(match[1], []), *value]
        if self._depth > 0 or self._is_conditional or "{" in words:
            value = [_unknown(f"the variable {match[1]} is set in a condition or loop")]
        self._variables[match[1]] = value

    def _take_back_own_variables(self) -> None:
        """Forget `A=1` before a command: it is the command's alone, and set after `$A` is read."""
        for name, value in self._before.items():
            if value is None:
                del self._variables[name]
            else:
                self._variables[name] = value
        self._before = {}

    def _array(self) -> list[str]:
        words: list[str] = []
        while self._position < len(self._text) and self._peek() != ")":
            if self._peek() == "\n":
                self._take()
            elif not self._is_skipped():
                words += self._word() or [self._take()]
        self._take()
        return words

    def _redirection(self, words: list[str]) -> None:
        if words and words[-1].isdigit() and self._text[self._position - 1].isdigit():
            words.pop()  # the 2 of `2>&1`
        while self._peek() in ("<", ">", "&", " ", "\t"):
            self._take()
        self._word()

    def _word(self) -> list[str]:
        """Return what one word becomes: several, or none, where a bare variable holds that many."""
        parts: list[str] = [""]
        is_quoted = False
        while self._position < len(self._text) and self._peek() not in _ENDS:
            char = self._peek()
            if self._peek(2) == "\\\n":
                break
            if char == "'":
                is_quoted = True
                self._take()
                parts[-1] += self._take_to("'")
            elif char == '"':
                quoted = self._double_quoted()
                is_quoted = is_quoted or bool(quoted)
                _join(parts, quoted)
            elif char == "$":
                _join(parts, [part for text in self._expansion() for part in _split(text)])
            elif char == "`":
                self._take()
                self._take_to("`")
                parts[-1] += _unknown("a command in `…` is not run")
            else:
                parts[-1] += self._take(2)[1:] if char == "\\" else self._take()
        return parts if is_quoted or parts != [""] else []

    def _double_quoted(self) -> list[str]:
        """Return the words of a quotation: one, or what `"${ARRAY[@]}"` and `"$@"` hold."""
        self._take()
        parts: list[str] = [""]
        is_empty_list = False
        while self._position < len(self._text) and self._peek() != '"':
            if self._peek() == "\\" and self._peek(2)[1:] in ("$", '"', "\\", "`", "\n"):
                escaped = self._take(2)[1]
                parts[-1] += "" if escaped == "\n" else escaped
            elif self._peek() == "$":
                words = self._expansion()
                is_empty_list = is_empty_list or not words
                _join(parts, words)
            else:
                parts[-1] += self._take()
        self._take()
        return [] if is_empty_list and parts == [""] else parts

    def _expansion(self) -> list[str]:
        self._take()
        if self._peek(2) == "((":
            return [self._sum(self._step_over_brackets("(", ")"))]
        if self._peek() == "(":
            self._step_over_brackets("(", ")")
            return [_unknown("a command in $(…) is not run")]
        if self._peek() == "{":
            return self._braces(self._step_over_brackets("{", "}"))
        if self._peek() in ("@", "*", "#", "?") or self._peek().isdigit():
            self._take()  # the script's own arguments: none
            return []
        match = _NAME.match(self._text, self._position)
        if match is None:
            return ["$"]
        self._position = match.end()
        return self._value(match[0])

    def _step_over_brackets(self, opening: str, closing: str) -> str:
        """Return what is between the brackets that begin here, and step over them."""
        start, depth = self._position + 1, 0
        while self._position < len(self._text):
            char = self._take()
            depth += (char == opening) - (char == closing)
            if depth == 0:
                break
        return self._text[start : self._position - 1]

    def _braces(self, inner: str) -> list[str]:
        match = _BRACES.fullmatch(inner)
        if match is None:
            return [_unknown(f"${{{inner}}} is not followed")]
        name, default = match[1], match[2]
        if default is not None and self._variables.get(name, [""]) == [""]:
            return [_Reader(default, self._variables).text()]
        return [] if name.isdigit() else self._value(name)

    def _value(self, name: str) -> list[str]:
        return self._variables.get(name, [_unknown(f"the variable {name} is not set")])

    def _sum(self, text: str) -> str:
        def number(match: re.Match[str]) -> str:
            return " ".join(self._value(match[1]))

        numbers = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number, text)
        try:
            return str(_evaluate(ast.parse(numbers.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return _unknown(f"the sum $(({text})) is not computed")


def _depth_of(words: list[str]) -> int:
    """Return how many conditions, loops and functions a command opens, less those it closes."""
    first = next((word for word in words if word not in _BEFORE_COMMANDS), "")
    return (first in _OPENING) + words.count("{") - (first in _CLOSING)


def _split(text: str) -> list[str]:
    """Split an unquoted value at blanks, but not a mark."""
    return [text] if unknown_in(text) else text.split()


def _join(parts: list[str], more: list[str]) -> None:
    """Append words to the last one, the first of them without a space between."""
    if more:
        parts[-1] += more[0]
        parts += more[1:]


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        return _SUMS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not a sum of whole numbers")
