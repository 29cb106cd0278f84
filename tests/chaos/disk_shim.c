/* Records and breaks what one process does to the disk below one directory. Loaded with LD_PRELOAD.
 *
 * Nothing happens until shim_arm is called. From then on every change below the directory is written to a log, one line
 * each, after it was done; and the n-th of the chosen operations fails, comes short, or kills the process before or
 * after it was done. Paths are expected to be absolute.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE = 2, FSYNC = 4, RENAME = 8, LINK = 16, UNLINK = 32, MKDIR = 64 };
enum { PASS = 0, FAIL = 1, SHORT = 2, KILL_BEFORE = 3, KILL_AFTER = 4, SHORT_THEN_FAIL = 5 };

static char root[PATH_MAX];
static size_t root_length;
static int log_file = -1, chosen, action, number, lasting;
static long at;
static atomic_long seen, strikes;

void shim_arm(const char *directory, const char *log, int operations, int what, int error, long nth, int stays) {
    strncpy(root, directory, sizeof root - 1);
    log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    chosen = operations, action = what, number = error, at = nth, lasting = stays;
    seen = strikes = 0;
    root_length = strlen(root);
}

long shim_strikes(void) { return strikes; }

static int below(const char *path) {
    return root_length && path && !strncmp(path, root, root_length) && (!path[root_length] || path[root_length] == '/');
}

static int path_of(int file, char *path) {
    if (!root_length) return 0;
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path);
}

static void note(char kind, unsigned long inode, long size, const char *path, const char *other) {
    char line[2 * PATH_MAX + 64];
    int saved = errno;
    int length = snprintf(line, sizeof line, "%c\t%lu\t%ld\t%s\t%s\n", kind, inode, size, path, other ? other : "");
    if (log_file >= 0) syscall(SYS_write, log_file, line, length);
    errno = saved;
}

static unsigned long inode_of(const char *path) {
    struct stat found;
    return fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) ? 0 : (unsigned long)found.st_ino;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What to do with this operation: PASS, FAIL, SHORT or KILL_AFTER. */
static int fate(int operation) {
    if (!(chosen & operation) || action == PASS) return PASS;
    long turn = atomic_fetch_add(&seen, 1) + 1;
    if (turn < at || (turn > at && !lasting)) return PASS;
    atomic_fetch_add(&strikes, 1);
    if (turn == at) note('!', 0, 0, "", "");
    if (action == KILL_BEFORE) die();
    int now = action == SHORT_THEN_FAIL ? (turn == at && operation == WRITE ? SHORT : FAIL) : action;
    if (now == FAIL) errno = number;
    return now;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CHECK(operation) int now = fate(operation); if (now == FAIL) return -1
#define DONE if (now == KILL_AFTER) die()

static ssize_t written(int file, const void *data, size_t length, off_t offset, int positioned) {
    static ssize_t (*real)(int, const void *, size_t);
    static ssize_t (*real_at)(int, const void *, size_t, off_t);
    if (!real) real = REAL(write), real_at = REAL(pwrite);
    char path[PATH_MAX];
    int now = path_of(file, path) ? fate(WRITE) : PASS;
    if (now == FAIL) return -1;
    if (now == SHORT && length > 1) length = (length + 1) / 2;
    ssize_t result = positioned ? real_at(file, data, length, offset) : real(file, data, length);
    DONE;
    return result;
}

ssize_t write(int file, const void *data, size_t length) { return written(file, data, length, 0, 0); }
ssize_t pwrite(int file, const void *data, size_t length, off_t offset) { return written(file, data, length, offset, 1); }
ssize_t pwrite64(int file, const void *data, size_t length, off_t offset) { return written(file, data, length, offset, 1); }

static int synced(int file, int data_only) {
    char path[PATH_MAX];
    struct stat found;
    if (!path_of(file, path)) return data_only ? REAL(fdatasync)(file) : REAL(fsync)(file);
    CHECK(FSYNC);
    int result = 0; /* the disk itself need not be waited for */
    if (!fstat(file, &found)) note(S_ISDIR(found.st_mode) ? 'D' : 'S', found.st_ino, found.st_size, path, 0);
    DONE;
    return result;
}

int fsync(int file) { return synced(file, 0); }
int fdatasync(int file) { return synced(file, 1); }

static int opened(int directory, const char *path, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = REAL(openat);
    if (!(flags & O_CREAT) || !below(path) || inode_of(path)) return real(directory, path, flags, mode);
    CHECK(CREATE);
    int result = real(directory, path, flags, mode);
    if (result >= 0) note('C', inode_of(path), 0, path, 0);
    DONE;
    return result;
}

#define MODE(flags) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int directory, const char *path, int flags, ...) { MODE(flags) return opened(directory, path, flags, mode); }
int openat64(int directory, const char *path, int flags, ...) { MODE(flags) return opened(directory, path, flags, mode); }

int rename(const char *old, const char *new) {
    if (!below(new)) return REAL(rename)(old, new);
    CHECK(RENAME);
    unsigned long inode = inode_of(old);
    int result = REAL(rename)(old, new);
    if (!result) note('R', inode, 0, old, new);
    DONE;
    return result;
}

int link(const char *old, const char *new) {
    if (!below(new)) return REAL(link)(old, new);
    CHECK(LINK);
    int result = REAL(link)(old, new);
    if (!result) note('L', inode_of(new), 0, new, 0);
    DONE;
    return result;
}

int unlink(const char *path) {
    if (!below(path) || !inode_of(path)) return REAL(unlink)(path);
    CHECK(UNLINK);
    unsigned long inode = inode_of(path);
    int result = REAL(unlink)(path);
    if (!result) note('U', inode, 0, path, 0);
    DONE;
    return result;
}

int rmdir(const char *path) {
    if (!below(path)) return REAL(rmdir)(path);
    CHECK(UNLINK);
    int result = REAL(rmdir)(path);
    if (!result) note('X', 0, 0, path, 0);
    DONE;
    return result;
}

int mkdir(const char *path, mode_t mode) {
    if (!below(path) || inode_of(path)) return REAL(mkdir)(path, mode);
    CHECK(MKDIR);
    int result = REAL(mkdir)(path, mode);
    if (!result) note('M', inode_of(path), 0, path, 0);
    DONE;
    return result;
}
