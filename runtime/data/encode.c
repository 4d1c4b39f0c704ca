/*
 * From text or JSON lines to words, tokens with their two bits: what is read by pieces, what of a line is trained on and what has no loss,
 * documents whole in windows, pairs of answers. What is wrong in a file is said by line and byte. Where the words go, and whether they
 * were made before, token_cache.c knows.
 */
#include "encode_internal.h"
#include "tokenizer_internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PIECE_BYTES = 1 << 20, LINE_BYTES_MAX = 64 << 20, READ_BYTES = 64 << 10 };

/* ---------------------------------------------------------------- writing */

static spw_status
flush(encoding *e, spw_error *err)
{
    for (uint64_t done = 0; done < e->buffered;) {
        ssize_t n = SPW_CALL(EIO, write(e->out, e->buffer + done, e->buffered - done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return SPW_RAISE_SYS(err, errno, "data: write tokens of %s to %s", e->path, e->part);
        done += (uint64_t)n;
    }
    e->buffered = 0;
    return SPW_OK;
}

/* Puts in front of an error where it is. */
static spw_status
at_line(const encoding *e, spw_status st, spw_error *err)
{
    spw_error_wrap(err, "data: %s: line %llu (byte %llu)", e->path, (unsigned long long)e->line,
                   (unsigned long long)e->line_offset);
    return st;
}

static spw_status
bad_token(const encoding *e, int64_t id, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: line %llu (byte %llu): token %lld is outside the vocabulary of %llu",
                     e->path, (unsigned long long)e->line, (unsigned long long)e->line_offset, (long long)id,
                     (unsigned long long)e->vocab);
}

/* Counts windows: word i is a target of the window of word i - 1, unless it has no loss. */
static void
see_word(encoding *e, uint64_t i, uint32_t word)
{
    uint32_t flags = word >> (e->wide ? 30 : 14);
    bool first = e->o->documents != SPW_DOCUMENTS_PACKED && (flags & CACHE_FIRST) != 0;
    if (i == 0)
        return;
    if ((flags & CACHE_NO_LOSS) == 0 && !first) {
        e->targets_seen++;
        e->targeted = true;
    }
    if (i % e->o->seq_length == 0) {
        e->untargeted += !e->targeted;
        e->targeted = false;
    }
}

/* As data_pack_options.emit takes it. */
static spw_status
put_words(void *ctx, const uint32_t *words, uint64_t count, spw_error *err)
{
    encoding *e = ctx;
    uint32_t width = e->wide ? 4 : 2;
    for (uint64_t i = 0; i < count; i++) {
        if (e->buffered + width > sizeof e->buffer)
            SPW_TRY(flush(e, err));
        see_word(e, e->tokens + i, words[i]);
        spw_put_le(e->buffer + e->buffered, words[i], width);
        e->buffered += width;
    }
    e->tokens += count;
    return SPW_OK;
}

static uint32_t
word_of(const encoding *e, int64_t id, uint32_t flags)
{
    return (uint32_t)id | flags << (e->wide ? 30 : 14);
}

static spw_status
put_token(encoding *e, int64_t id, uint32_t flags, spw_error *err)
{
    uint32_t word = word_of(e, id, flags);
    if (id < 0 || (uint64_t)id >= e->vocab)
        return bad_token(e, id, err);
    return e->packer != NULL ? spw__data_pack_put(e->packer, word, err) : put_words(e, &word, 1, err);
}

/* A text's token: of a pair it waits for the others. */
static spw_status
take_token(encoding *e, int32_t id, uint32_t flags, spw_error *err)
{
    if (!e->o->pairs)
        return put_token(e, id, flags, err);
    SPW_TRY(spw_tokens_push(&e->turns, id, err));
    return spw_tokens_push(&e->targets, (flags & CACHE_NO_LOSS) != 0 ? -1 : id, err);
}

/* One document, part by part: bytes of text as tokens, the first of all marked when *begun is false. */
static spw_status
put_text(encoding *e, const char *text, uint64_t bytes, bool rest, uint32_t flags, bool *begun, spw_error *err)
{
    uint64_t count = bytes;
    if (e->o->encode != NULL) {
        for (bool again = true; again;) {
            spw_status st = e->o->encode(e->o->encode_ctx, text, bytes, rest, e->ids, e->id_room, &count, err);
            if (st != SPW_OK)
                return at_line(e, st, err);
            again = count > e->id_room;
            if (again) {
                uint64_t room = count + count / 2 + SPW__OUT_TOKENS; /* so that few texts are encoded twice */
                spw_mem_free(e->ids);
                e->id_room = 0;
                e->ids = spw_mem_calloc(room, sizeof *e->ids);
                if (e->ids == NULL)
                    return SPW_RAISE(err, SPW_ENOMEM, "%llu tokens of %s", (unsigned long long)room, e->path);
                e->id_room = room;
            }
        }
    }
    for (uint32_t i = 0, n = count > 0 && !*begun ? e->o->begin_of_text.count : 0; i < n; i++) {
        SPW_TRY(take_token(e, e->o->begin_of_text.ids[i], flags | (*begun ? 0 : CACHE_FIRST), err));
        *begun = true;
    }
    for (uint64_t i = 0; i < count; i++) {
        SPW_TRY(take_token(e, e->o->encode != NULL ? e->ids[i] : (unsigned char)text[i],
                           flags | (*begun ? 0 : CACHE_FIRST), err));
        *begun = true;
    }
    return SPW_OK;
}

/* What ends a text. */
static spw_status
put_end(encoding *e, spw_error *err)
{
    if (e->of_tokens)
        return SPW_OK;
    if (e->o->end_of_text_set)
        return take_token(e, e->o->end_of_text, 0, err);
    return e->o->encode == NULL ? take_token(e, '\n', 0, err) : SPW_OK;
}

static spw_status
end_document(encoding *e, bool begun, spw_error *err)
{
    if (!begun)
        return SPW_OK; /* nothing was in it */
    e->documents++;
    SPW_TRY(put_end(e, err));
    return e->packer != NULL ? spw__data_pack_end(e->packer, err) : SPW_OK;
}

/* ---------------------------------------------------------------- reading */

/* Makes room for more text behind what is there, and reads some; *have stays where the file ends. */
static spw_status
read_more(encoding *e, spw_error *err)
{
    ssize_t n;
    if (e->at > 0) {
        memmove(e->text, e->text + e->at, e->have - e->at);
        e->offset += e->at;
        e->have -= e->at;
        e->at = 0;
    }
    if (e->have + READ_BYTES > e->room) {
        uint64_t room = e->room * 2 + READ_BYTES;
        char *text = spw_mem_zalloc(room);
        if (text == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "%llu bytes for a line of %s", (unsigned long long)room, e->path);
        if (e->have > 0)
            memcpy(text, e->text, e->have);
        spw_mem_free(e->text);
        e->text = text;
        e->room = room;
    }
    do {
        n = SPW_CALL(EIO, read(e->fd, e->text + e->have, READ_BYTES));
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return SPW_RAISE_SYS(err, errno, "data: read %s at byte %llu", e->path,
                             (unsigned long long)(e->offset + e->have));
    e->have += (uint64_t)n;
    return SPW_OK;
}

/* Tokens that a line holds, as they are. */
static spw_status
put_ids(encoding *e, const spw_data_line *line, const char *name, uint32_t flags, bool *begun, spw_error *err)
{
    spw_status st;
    e->listed.count = e->labels.count = 0;
    st = spw_data_line_tokens(line, name, NULL, &e->listed, &e->labels, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    for (uint64_t i = 0; i < e->listed.count; i++) {
        SPW_TRY(take_token(e, e->listed.ids[i], flags | (*begun ? 0 : CACHE_FIRST), err));
        *begun = true;
    }
    return SPW_OK;
}

/* Those of text_field, of which labels beside them say which have loss, and which of them begin another document. */
static spw_status
put_documents(encoding *e, const spw_data_line *line, const char *name, bool *begun, spw_error *err)
{
    const char *labels = e->o->labels_field != NULL && e->o->labels_field[0] != '\0' ? e->o->labels_field : "labels";
    uint64_t i = 0, end = 0;
    spw_status st;
    e->listed.count = e->labels.count = e->lengths.count = 0;
    st = spw_data_line_tokens(line, name, labels, &e->listed, &e->labels, err);
    if (st == SPW_OK)
        st = spw_data_line_lengths(line, e->listed.count, &e->lengths, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    for (uint64_t k = 0; k < e->lengths.count; k++) {
        if (k > 0) {
            SPW_TRY(end_document(e, *begun, err));
            *begun = false;
        }
        for (end += (uint64_t)e->lengths.ids[k]; i < end; i++) {
            SPW_TRY(put_token(e, e->listed.ids[i],
                              (*begun ? 0 : CACHE_FIRST) | (e->labels.ids[i] < 0 ? CACHE_NO_LOSS : 0), err));
            *begun = true;
        }
    }
    return SPW_OK;
}

static spw_status
put_field(encoding *e, spw_data_line *line, const char *name, uint32_t flags, bool *begun, spw_error *err)
{
    const char *text;
    uint64_t bytes;
    spw_status st;
    if (e->of_tokens)
        return put_ids(e, line, name, flags, begun, err);
    st = spw_data_line_text(line, name, &text, &bytes, err);
    if (st == SPW_OK)
        return put_text(e, text, bytes, false, flags, begun, err);
    return at_line(e, st, err);
}

const char *
spw__encoding_text_field(const spw_data_options *o)
{
    return o->text_field != NULL && o->text_field[0] != '\0' ? o->text_field : "text";
}

static spw_status
put_conversation(encoding *e, const spw_data_line *line, spw_error *err)
{
    spw_status st;
    e->turns.count = e->targets.count = 0;
    st = spw_chat_encode(e->o->chat, line, e->o->messages_field, &e->turns, &e->targets, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    for (uint64_t i = 0; st == SPW_OK && i < e->turns.count; i++)
        st = put_token(e, e->turns.ids[i], (i == 0 ? CACHE_FIRST : 0) | (e->targets.ids[i] < 0 ? CACHE_NO_LOSS : 0),
                       err);
    e->documents += e->turns.count > 0;
    return st == SPW_OK && e->packer != NULL ? spw__data_pack_end(e->packer, err) : st;
}

/* One of a pair's parts, behind what is there. */
static spw_status
take_answer(encoding *e, spw_data_line *line, const data_pair *p, const char *answer, spw_error *err)
{
    bool begun = false;
    if (p->talks) {
        spw_status st =
            spw_chat_encode_answer(e->o->chat, line, p->prompt, answer, p->shared, &e->turns, &e->targets, err);
        return st == SPW_OK ? SPW_OK : at_line(e, st, err);
    }
    if (p->prompt != NULL)
        SPW_TRY(put_field(e, line, p->prompt, CACHE_NO_LOSS, &begun, err));
    SPW_TRY(put_field(e, line, answer, 0, &begun, err));
    return begun ? put_end(e, err) : SPW_OK;
}

/* Two documents that stay together: to the packer they are one. */
static spw_status
put_pair(encoding *e, spw_data_line *line, spw_error *err)
{
    data_pair p;
    uint64_t middle;
    spw_status st = spw__data_pair_find(&p, line, e->o, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    e->turns.count = e->targets.count = 0;
    SPW_TRY(take_answer(e, line, &p, p.answers[0], err));
    middle = e->turns.count;
    SPW_TRY(take_answer(e, line, &p, p.answers[1], err));
    if (!p.talks && p.prompt == NULL)
        spw__data_pair_hide(&e->turns, &e->targets, middle);
    e->prompted = e->prompted || p.prompted;
    e->bare = e->bare || p.bare;
    if (!spw__data_pair_differs(&e->turns, &e->targets, middle)) {
        e->alike++;
        return SPW_OK;
    }
    if (e->turns.count > e->o->seq_length) {
        e->longer++;
        return SPW_OK;
    }
    e->documents++;
    e->apart += p.apart;
    for (uint64_t i = 0; i < e->turns.count; i++)
        SPW_TRY(put_token(e, e->turns.ids[i],
                          (i == 0 || i == middle ? CACHE_FIRST : 0) | (e->targets.ids[i] < 0 ? CACHE_NO_LOSS : 0),
                          err));
    return spw__data_pack_end(e->packer, err);
}

static spw_status
put_line(encoding *e, const char *text, uint64_t bytes, spw_error *err)
{
    const char *prompt = e->o->prompt_field, *field = spw__encoding_text_field(e->o);
    spw_data_line *line;
    bool begun = false;
    spw_status st = spw_data_line_open(&line, text, bytes, err);
    if (st != SPW_OK)
        return at_line(e, st, err);
    if (line == NULL)
        return SPW_OK;
    if (e->o->pairs) {
        st = put_pair(e, line, err);
        spw_data_line_close(line);
        return st;
    }
    if (e->o->chat != NULL && spw_chat_is_in(line, e->o->messages_field)) {
        st = put_conversation(e, line, err);
        spw_data_line_close(line);
        return st;
    }
    if (prompt != NULL && prompt[0] != '\0')
        st = put_field(e, line, prompt, CACHE_NO_LOSS, &begun, err);
    if (st == SPW_OK)
        st = e->of_tokens ? put_documents(e, line, field, &begun, err) : put_field(e, line, field, 0, &begun, err);
    if (st == SPW_OK)
        st = end_document(e, begun, err);
    spw_data_line_close(line);
    return st;
}

static spw_status
encode_lines(encoding *e, spw_error *err)
{
    uint64_t seen = 0; /* of [at, have): no line end in these */
    bool more = true;
    while (more || e->at < e->have) {
        char *end = e->at + seen < e->have ? memchr(e->text + e->at + seen, '\n', e->have - e->at - seen) : NULL;
        uint64_t before = e->offset + e->have;
        e->line_offset = e->offset + e->at;
        if (end == NULL && more) {
            seen = e->have - e->at;
            if (seen > LINE_BYTES_MAX)
                return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s: line %llu (byte %llu) has more than %d MiB", e->path,
                                 (unsigned long long)e->line + 1, (unsigned long long)e->line_offset,
                                 LINE_BYTES_MAX >> 20);
            SPW_TRY(read_more(e, err));
            more = e->offset + e->have > before;
            continue;
        }
        e->line++;
        {
            uint64_t bytes = end != NULL ? (uint64_t)(end - e->text) - e->at : e->have - e->at;
            SPW_TRY(put_line(e, e->text + e->at, bytes, err));
            e->at += bytes + (end != NULL);
        }
        seen = 0;
    }
    return SPW_OK;
}

/* Where to cut text of n bytes so that no pre-tokenizer would have joined both sides; see spw_data_encode_fn. Tokens of several
 * words have no line's end in them. */
static uint64_t
cut(const char *text, uint64_t n)
{
    uint64_t word = 0, line = 0;
    for (uint64_t i = n - 1; i > 0; i--) {
        bool may = spw__tok_may_cut(text, n, i);
        if (may && text[i] != ' ')
            return i;
        word = may && word == 0 ? i : word;
        line = line == 0 && text[i] == '\n' ? i : line;
    }
    if (word > 0 || line > 0)
        return word > 0 ? word : line;
    for (uint64_t i = n - 1; i + 4 > n && i > 0; i--) { /* no lines: not inside a character */
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return i;
    }
    return n;
}

static spw_status
encode_text(encoding *e, spw_error *err)
{
    bool begun = false, more = true;
    e->line = 1;
    while (more || e->at < e->have) {
        uint64_t before = e->offset + e->have, n;
        if (more && e->have - e->at < PIECE_BYTES) {
            SPW_TRY(read_more(e, err));
            more = e->offset + e->have > before;
            continue;
        }
        n = e->have - e->at;
        if (more || n > PIECE_BYTES)
            n = cut(e->text + e->at, PIECE_BYTES);
        e->line_offset = e->offset + e->at;
        SPW_TRY(put_text(e, e->text + e->at, n, begun, 0, &begun, err));
        for (uint64_t i = 0; i < n; i++)
            e->line += e->text[e->at + i] == '\n';
        e->at += n;
    }
    return end_document(e, begun, err);
}

/* ---------------------------------------------------------------- a file */

static spw_status
open_packer(encoding *e, spw_error *err)
{
    const data_pack_options o = {.window = e->o->seq_length,
                                 .pad = word_of(e, e->o->end_of_text_set ? e->o->end_of_text : 0, CACHE_NO_LOSS),
                                 .first = word_of(e, 0, CACHE_FIRST),
                                 .emit = put_words,
                                 .ctx = e};
    return e->o->documents == SPW_DOCUMENTS_WHOLE ? spw__data_pack_open(&e->packer, &o, err) : SPW_OK;
}

/* What happened to a file's pairs. */
static void
say_pairs(const encoding *e)
{
    bool named = e->o->prompt_field != NULL && e->o->prompt_field[0] != '\0';
    if (e->cut > 0)
        spw_log(
            SPW_LOG_NOTE,
            "data: %s: left out are %llu pairs longer than %llu tokens, %llu whose answers are the same or without a "
            "target",
            e->path, (unsigned long long)e->longer, (unsigned long long)e->o->seq_length, (unsigned long long)e->alike);
    if (e->apart > 0)
        spw_log(SPW_LOG_WARN,
                "data: %s: the answers of %llu of %llu pairs are to different prompts: what differs before them is "
                "compared, too",
                e->path, (unsigned long long)e->apart, (unsigned long long)e->documents);
    if (!e->prompted && (named || e->bare))
        spw_log(SPW_LOG_WARN, "data: %s: no pair has a prompt: no line has field \"%s\" (data.prompt_field)", e->path,
                named ? e->o->prompt_field : "prompt");
}

static spw_status
finish_windows(encoding *e, spw_error *err)
{
    uint64_t padding;
    if (e->packer != NULL && e->documents > 0) {
        SPW_TRY(spw__data_pack_finish(e->packer, &padding, &e->cut, err));
        spw_log(SPW_LOG_NOTE, "data: %s: %llu %s in %llu windows of %llu tokens, %.1f%% of them padding", e->path,
                (unsigned long long)e->documents, e->o->pairs ? "pairs" : "documents",
                (unsigned long long)((e->tokens - 1) / e->o->seq_length), (unsigned long long)e->o->seq_length,
                100.0 * (double)padding / (double)e->tokens);
    }
    if (e->o->pairs) {
        e->cut = e->longer + e->alike;
        say_pairs(e);
    }
    return SPW_OK;
}

spw_status
spw__encoding_run(encoding *e, spw_data_format format, spw_error *err)
{
    SPW_TRY(open_packer(e, err));
    SPW_TRY(format == SPW_DATA_JSONL ? encode_lines(e, err) : encode_text(e, err));
    SPW_TRY(finish_windows(e, err));
    return flush(e, err);
}

void
spw__encoding_deinit(encoding *e)
{
    if (e->fd >= 0)
        close(e->fd);
    if (e->out >= 0)
        close(e->out);
    spw__data_pack_close(e->packer);
    spw_mem_free(e->text);
    spw_mem_free(e->ids);
    spw_tokens_free(&e->turns);
    spw_tokens_free(&e->targets);
    spw_tokens_free(&e->listed);
    spw_tokens_free(&e->labels);
    spw_tokens_free(&e->lengths);
}

/* The first line that has more than blanks; *text NULL: there is none, or none that is short enough. */
static spw_status
read_first_line(FILE *file, const char *path, char **text, uint64_t *bytes, spw_error *err)
{
    uint64_t room = READ_BYTES;
    char *line = spw_mem_zalloc(room);
    int c = 0;
    *text = NULL;
    *bytes = 0;
    while (line != NULL && (c = getc_unlocked(file)) != EOF && (c != '\n' || *bytes == 0) && *bytes < LINE_BYTES_MAX) {
        if (*bytes == 0 && (c == ' ' || c == '\t' || c == '\r' || c == '\n'))
            continue;
        if (*bytes == room) {
            char *more = spw_mem_zalloc(2 * room);
            if (more != NULL)
                memcpy(more, line, room);
            spw_mem_free(line);
            line = more;
            room *= 2;
        }
        if (line != NULL)
            line[(*bytes)++] = (char)c;
    }
    if (line == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "the first line of %s", path);
    if (*bytes > 0 && *bytes < LINE_BYTES_MAX)
        *text = line;
    else
        spw_mem_free(line);
    return SPW_OK;
}

spw_status
spw__encoding_see_first_line(data_file *f, const spw_data_options *o, spw_error *err)
{
    spw_error ignored = {0};
    spw_data_line *line = NULL;
    FILE *file = fopen(f->path, "re");
    char *text;
    uint64_t bytes;
    spw_status st;
    if (file == NULL)
        return SPW_RAISE_SYS(err, errno, "data: open %s", f->path);
    st = read_first_line(file, f->path, &text, &bytes, err);
    fclose(file);
    if (st != SPW_OK || text == NULL || spw_data_line_open(&line, text, bytes, &ignored) != SPW_OK || line == NULL) {
        spw_mem_free(text);
        return st;
    }
    if (o->chat == NULL || !spw_chat_is_in(line, o->messages_field))
        f->of_tokens =
            o->pairs ? spw__data_pair_has_tokens(line, o) : spw_data_line_has_tokens(line, spw__encoding_text_field(o));
    spw_data_line_close(line);
    spw_mem_free(text);
    return SPW_OK;
}
