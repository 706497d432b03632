"""What a chat request says about tools: which the model sees, and how its answer is read."""

from __future__ import annotations

from dataclasses import dataclass

from .context import ServerContext
from .errors import bad_request
from .prepare import MakeGrammar
from .response_format import arguments_schema, call_schema, grammar_of, schema_grammar
from .schema import ChatBody, NamedToolChoice, Tool
from .tools import AnswerReader, ForcedCalls, PlainText, ToolFormat, ToolReader


@dataclass(frozen=True)
class ToolUse:
    """tools: those that the model sees, none where the choice is "none". forced: the answer is calls and nothing else;
    named: of this one function. only_one: parallel_tool_calls is false."""

    tools: list[Tool]
    tool_format: ToolFormat
    forced: bool = False
    named: Tool | None = None
    only_one: bool = False

    @classmethod
    def of(cls, context: ServerContext, body: ChatBody) -> ToolUse:
        """Raises ApiError 400 for a choice that the tools do not have, or that does not go with the response format."""
        tools, choice = body.tools or [], body.tool_choice
        if not tools and choice not in (None, "none"):
            raise bad_request("tool_choice: goes with tools only", "tool_choice")
        if choice == "none":
            tools = []
        if tools and body.response_format is not None and body.response_format.type != "text":
            raise bad_request('response_format: goes with tools only where tool_choice is "none"', "response_format")
        named = None
        if isinstance(choice, NamedToolChoice):
            named = next((tool for tool in tools if tool.function.name == choice.function.name), None)
            if named is None:
                raise bad_request("tool_choice: names a function that is not among tools", "tool_choice")
        only_one = body.parallel_tool_calls is False
        return cls(tools, context.tool_format, named is not None or choice == "required", named, only_one)

    def reader(self) -> AnswerReader:
        """A new one for each choice."""
        if not self.tools:
            return PlainText()
        if self.forced:
            return ForcedCalls(self.named.function.name if self.named else None)
        names = {tool.function.name for tool in self.tools}
        return ToolReader(self.tool_format, names, only_one=self.only_one)

    def grammar(self, context: ServerContext, body: ChatBody) -> MakeGrammar | None:
        if not self.forced:
            return grammar_of(context, body)
        schema = arguments_schema(self.named) if self.named else call_schema(self.tools, only_one=self.only_one)
        return schema_grammar(context, body, schema, "tools")

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """OpenAI's: "tool_calls" where the model chose to call, "stop" where one function was forced."""
        return "tool_calls" if reason == "stop" and num_calls and not self.named else reason
