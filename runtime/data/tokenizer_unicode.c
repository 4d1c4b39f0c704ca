/*
 * UTF-8 that may be broken, Unicode's white space, and NFC. Composition is utf8proc's; ours is to find the short stretches
 * that can change at all, and to keep a long run of combining marks from taking quadratic time. Everything is pure but
 * for the caller's scratch.
 */
#include "tokenizer_internal.h"
#include <utf8proc.h>

uint32_t
spw__utf8_next(const char *text, uint64_t bytes, uint32_t *point)
{
    const unsigned char *p = (const unsigned char *)text;
    uint32_t lead = p[0], need, low = 0x80, high = 0xbf, cp;
    if (lead < 0x80) {
        *point = lead;
        return 1;
    }
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    need = lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
    cp = lead & (0x3fu >> need);
    if (bytes <= need)
        return 0;
    if (lead == 0xe0) /* shorter forms exist */
        low = 0xa0;
    else if (lead == 0xed) /* surrogates */
        high = 0x9f;
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4) /* beyond U+10FFFF */
        high = 0x8f;
    for (uint32_t i = 1; i <= need; i++) {
        if (p[i] < low || p[i] > high)
            return 0;
        cp = cp << 6 | (p[i] & 0x3fu);
        low = 0x80;
        high = 0xbf;
    }
    *point = cp;
    return need + 1;
}

/* How many bytes from here on are ASCII. */
static uint64_t
ascii_span(const char *text, uint64_t bytes)
{
    uint64_t at = 0, eight;
    for (; at + 8 <= bytes; at += 8) {
        memcpy(&eight, text + at, 8);
        if ((eight & 0x8080808080808080u) != 0)
            break;
    }
    while (at < bytes && (unsigned char)text[at] < 0x80)
        at++;
    return at;
}

uint64_t
spw__utf8_valid(const char *text, uint64_t bytes)
{
    uint64_t at = 0;
    while ((at += ascii_span(text + at, bytes - at)) < bytes) {
        uint32_t cp, length = spw__utf8_next(text + at, bytes - at, &cp);
        if (length == 0)
            break;
        at += length;
    }
    return at;
}

bool
spw__is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || cp == 0x20 || cp == 0x85 || cp == 0xa0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 || cp == 0x202f || cp == 0x205f ||
           cp == 0x3000;
}

/*
 * Characters that NFC leaves alone and that never join with what stands before them; text may be cut before each of them.
 * Not all there are: those that most text is made of. tests/test_tokenizer.c compares with utf8proc, one by one.
 */
static bool
inert(uint32_t cp)
{
    static const uint32_t range[][2] = {
        {0x0400, 0x0482}, {0x048a, 0x052f}, {0x0531, 0x058a},   {0x05be, 0x05be},  {0x05d0, 0x05ea}, {0x0621, 0x064a},
        {0x0904, 0x0939}, {0x0e01, 0x0e30}, {0x10a0, 0x10ff},   {0x2010, 0x2027},  {0x2030, 0x205e}, {0x2070, 0x20cf},
        {0x2190, 0x2328}, {0x2330, 0x2adb}, {0x2e80, 0x3029},   {0x3030, 0x3098},  {0x309b, 0x312f}, {0x3130, 0xa4cf},
        {0xac00, 0xd7a3}, {0xfe30, 0xffef}, {0x1f000, 0x1faff}, {0x20000, 0x2ebe0}};
    if (cp < 0x300)
        return true;
    for (size_t i = 0; i < sizeof range / sizeof range[0] && cp >= range[i][0]; i++) {
        if (cp <= range[i][1])
            return true;
    }
    return false;
}

/* Orders runs of combining marks by their class, stable: short ones by insertion, long ones by counting. */
static void
order_marks(int32_t *points, int32_t *spare, uint64_t count)
{
    for (uint64_t first = 0, end; first < count; first = end + 1) {
        for (end = first; end < count && utf8proc_get_property(points[end])->combining_class != 0;)
            end++;
        if (end - first <= 16) {
            for (uint64_t i = first + 1; i < end; i++) {
                int32_t moving = points[i];
                int order = utf8proc_get_property(moving)->combining_class;
                uint64_t to = i;
                for (; to > first && utf8proc_get_property(points[to - 1])->combining_class > order; to--)
                    points[to] = points[to - 1];
                points[to] = moving;
            }
        } else {
            uint64_t start[257] = {0};
            for (uint64_t i = first; i < end; i++)
                start[(uint8_t)utf8proc_get_property(points[i])->combining_class + 1]++;
            for (int c = 0; c < 256; c++)
                start[c + 1] += start[c];
            for (uint64_t i = first; i < end; i++)
                spare[start[(uint8_t)utf8proc_get_property(points[i])->combining_class]++] = points[i];
            memcpy(points + first, spare, (end - first) * sizeof *points);
        }
    }
}

/* Appends the NFC of valid UTF-8 to s->normal at *used. */
static spw_status
compose(tok_scratch *s, const char *text, uint64_t bytes, uint64_t *used, spw_error *err)
{
    const utf8proc_option_t canonical = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE;
    uint64_t count = 0, room = 2 * bytes + 4; /* two bytes become at most three characters, three bytes four */
    utf8proc_ssize_t composed;
    SPW_TRY(spw__tok_grow((void **)&s->points, &s->points_bytes, 2 * room * sizeof *s->points, 0, "NFC", err));
    for (uint64_t at = 0; at < bytes;) {
        uint32_t cp;
        utf8proc_ssize_t got;
        at += spw__utf8_next(text + at, bytes - at, &cp);
        got = utf8proc_decompose_char((utf8proc_int32_t)cp, s->points + count, (utf8proc_ssize_t)(room - count),
                                      canonical, NULL);
        if (got < 0 || (uint64_t)got > room - count)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "NFC of U+%04X: %s", cp, utf8proc_errmsg(got));
        count += (uint64_t)got;
    }
    order_marks(s->points, s->points + room, count);
    composed = utf8proc_normalize_utf32(s->points, (utf8proc_ssize_t)count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (composed < 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "NFC: %s", utf8proc_errmsg(composed));
    SPW_TRY(spw__tok_grow((void **)&s->normal, &s->normal_bytes, *used + 4 * (uint64_t)composed, *used, "NFC", err));
    for (utf8proc_ssize_t i = 0; i < composed; i++)
        *used += (uint64_t)utf8proc_encode_char(s->points[i], (utf8proc_uint8_t *)s->normal + *used);
    return SPW_OK;
}

spw_status
spw__tok_nfc(tok_scratch *s, const char *text, uint64_t bytes, const char **out, uint64_t *bytes_out, spw_error *err)
{
    uint64_t used = 0, copied = 0; /* text up to copied is in s->normal */
    uint64_t last = 0;             /* where the character before starts: what follows may join with it */
    *out = text;
    *bytes_out = bytes;
    for (uint64_t at = 0; at < bytes;) {
        uint64_t span = ascii_span(text + at, bytes - at);
        uint32_t cp, length;
        if (span > 0) {
            at += span;
            last = at - 1;
            continue;
        }
        length = spw__utf8_next(text + at, bytes - at, &cp);
        if (length == 0 || inert(cp)) {
            at += length == 0 ? 1 : length;
            last = length == 0 ? at : at - length;
            continue;
        }
        for (at += length; at < bytes; at += length) { /* up to where text can be cut again */
            length = spw__utf8_next(text + at, bytes - at, &cp);
            if (length == 0 || inert(cp))
                break;
        }
        SPW_TRY(spw__tok_grow((void **)&s->normal, &s->normal_bytes, used + (last - copied), used, "NFC", err));
        if (last > copied)
            memcpy(s->normal + used, text + copied, last - copied);
        used += last - copied;
        SPW_TRY(compose(s, text + last, at - last, &used, err));
        copied = last = at;
    }
    if (copied > 0) {
        SPW_TRY(spw__tok_grow((void **)&s->normal, &s->normal_bytes, used + (bytes - copied), used, "NFC", err));
        memcpy(s->normal + used, text + copied, bytes - copied);
        *out = s->normal;
        *bytes_out = used + (bytes - copied);
    }
    return SPW_OK;
}
