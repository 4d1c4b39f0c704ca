/*
 * spw_monitor.h - DeepSpeed's csv_monitor and tensorboard: numbers of a run over its samples, in files that other tools draw.
 */
#ifndef SPW_MONITOR_H
#define SPW_MONITOR_H

#include "spw_config.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spw_monitor spw_monitor;
enum { SPW_MONITOR_FOLDER_BYTES = SPW_PATH_BYTES + 256 };
/* OUTPUT_PATH/JOB_NAME of one of them. */
void spw_monitor_folder(char out[SPW_MONITOR_FOLDER_BYTES], const spw_monitor_config *c);
/*
 * spw_monitor_open - makes OUTPUT_PATH/JOB_NAME of each monitor that is enabled. *out NULL: none is.
 *   samples  that were trained on before: what TensorBoard's files have of later ones, of a run that got further, counts no more
 * Errors  SPW_ESYS naming the key and the folder or file.
 */
spw_status spw_monitor_open(spw_monitor **out, const spw_config *config, uint64_t samples, spw_error *err);
/*
 * spw_monitor_write - one number.
 *   tag      "Train/Samples/lr"; csv: a file of that name with "_" for "/", of rows "samples,value" below a header
 *   samples  sequences trained on so far
 * What cannot be written is warned of once, and that monitor is over: a run does not end for it. One thread at a time.
 */
void spw_monitor_write(spw_monitor *m, const char *tag, double value, uint64_t samples); /* m NULL: nothing */
void spw_monitor_close(spw_monitor *m);                                                  /* NULL is fine */

/*
 * spw_monitor_record - a record of an event file: a length, its checksum, an event of TensorBoard, its checksum (CRC-32C, rotated
 * and offset as TFRecord files have them).
 *   out  (SPW_MONITOR_RECORD_BYTES) out
 *   tag  at most 200 bytes; NULL: the event that begins a file, or, with samples, the start of a session, by which readers drop
 *        what files before have from there on
 * Returns the bytes of it.
 */
enum { SPW_MONITOR_RECORD_BYTES = 512 };
uint64_t spw_monitor_record(unsigned char *out, double wall_s, const char *tag, float value, uint64_t samples);

#ifdef __cplusplus
}
#endif
#endif
