/*
 * spw_chat.h - conversations as tokens: turns of system, user, assistant and tools in the layout that a model was tuned with, and which
 * of the tokens are the assistant's.
 *
 * A layout is text before and after each role's content. The special tokens in it become their ids; what is spelled like one in
 * a content stays text. Ids are those of the rendered text by the tokenizers library, content of that kind apart. The chat_template of
 * a model's folder is a program and is not run: where it adds what no message says (a system prompt, a date), this does not.
 */
#ifndef SPW_CHAT_H
#define SPW_CHAT_H

#include "spw_data.h"
#include "spw_tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * spw_chat_open - a layout for a tokenizer, which is borrowed until close.
 *   layout   a name of spw_chat_names(); a file that describes one (its name ends in .json); or "auto": the one whose
 *            special tokens the tokenizer has and the chat_template beside it, if there is one, uses; of several the one that
 *            has all tokens of the others too
 *
 * A file: {"begin": "", "system": [BEFORE, AFTER], "user": [BEFORE, AFTER], "assistant": [BEFORE, AFTER], "tool": [BEFORE, AFTER],
 * "end": "", "tokens": ["<|im_end|>", ...], "trim": false}. user, assistant and tokens (the special ones) are needed. Without "system" the
 * system's text comes before the first user's, an empty line between them, and turns of user and assistant alternate. "trim"
 * takes white space from both ends of contents.
 *
 * With tools: "tools": [BEFORE, BETWEEN, AFTER] is around the list, whose JSON is indented by "tools_indent" (0: on one line) and stands where
 * "tools_in" says: "system" (behind its text), "first user" (before its text) or "last user" (before its turn). "calls": [BEFORE, CALL, BETWEEN,
 * AFTER] is around an answer's calls, BETWEEN null where it makes one at a time; CALL has {name} and {arguments}, and may have {id}. "calls_behind"
 * is between a content and calls; without it there are not both. "tool" is around a result, and its AFTER may have {id}; "results":
 * [BEFORE, AFTER] around results in a row. "reasoning": [BEFORE, AFTER] is around an answer's, before its content.
 *
 * Errors  SPW_ECONFIG naming the layouts where the name is none or auto fits none or several; naming the special token that the
 *         tokenizer does not have; naming the member of a file. SPW_ENOENT, SPW_ECORRUPT: the file. SPW_ENOMEM.
 */
typedef struct spw_chat spw_chat;
spw_status spw_chat_open(spw_chat **out, const char *layout, const spw_tokenizer *t, spw_error *err);
void spw_chat_close(spw_chat *c); /* NULL is fine */

const char *spw_chat_names(void); /* "chatml, llama3, ..." */
const char *
spw_chat_says(const spw_chat *c);         /* "chatml", or "auto: chatml, whose <|im_start|> ... the tokenizer has" */
uint64_t spw_chat_key(const spw_chat *c); /* a checksum of the layout */
int32_t spw_chat_end_of_turn(const spw_chat *c); /* the special token that ends an assistant's turn; -1: none */

/*
 * spw_chat_encode - appends a conversation.
 *   line     an open line with the conversation
 *   field    its field; NULL or "": "messages", or "conversations" where that is missing
 *   tokens   out   ids
 *   targets  out   as many: the id where it is the assistant's content or ends the turn, else -1. A token that is partly
 *                  content is content.
 *
 * A message has "role" and "content", or "from" and "value". Roles are system, user (human), assistant (gpt) and, where the layout
 * has it, tool. Content is text, or a list of {"type": "text", "text": TEXT}. "weight": 0 takes an assistant's turn out of the targets.
 * A "system" of the line, beside the list, is the first turn; the first message may say the same. A member that is null is not there.
 *
 * Where the layout has them: "tools" of the line, a list of objects; an assistant's "tool_calls", [{"type": "function", "id": ID, "function":
 * {"name": NAME, "arguments": OBJECT}}], beside which content may be null; a tool's "tool_call_id"; an assistant's "reasoning_content"
 * ("reasoning", "thinking"), a target too, of turns behind the last question. Tools and arguments may be text that holds the JSON.
 *
 * Errors  SPW_ECORRUPT naming message and member: no list, an empty one, unknown roles, turns, tools or reasoning that the layout cannot
 *         say, or that the chat template beside the tokenizer says otherwise (auto); a tool's turn that answers no call; content or
 *         arguments of the wrong kind; function_call and functions; a system's message with another text than the line's.
 *         SPW_ENOMEM. What was appended until then stays.
 * Threads one at a time for each c.
 */
spw_status spw_chat_encode(spw_chat *c, const spw_data_line *line, const char *field, spw_tokens *tokens,
                           spw_tokens *targets, spw_error *err);
/*
 * spw_chat_encode_answer - appends a conversation that begins in one field of a line and goes on in another, as spw_chat_encode().
 *   prompt   the field that comes first: a list of messages, or a text, which is a user's turn; NULL: none
 *   field    the field behind it, a list
 *   without  so many messages of both, from the first, have no targets
 */
spw_status spw_chat_encode_answer(spw_chat *c, const spw_data_line *line, const char *prompt, const char *field,
                                  uint64_t without, spw_tokens *tokens, spw_tokens *targets, spw_error *err);
/* Whether the line has that field. */
bool spw_chat_is_in(const spw_data_line *line, const char *field);
/* Appends a conversation of one user's turn, up to where the assistant's content begins, without a space before that. */
spw_status spw_chat_encode_prompt(spw_chat *c, const char *text, uint64_t bytes, spw_tokens *tokens, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
