// Where Python's objects lie.
#pragma once

namespace headrace {

// From now on, Python's allocator of small objects takes its arenas out of large pages, where the system has them.
// Idempotent; whoever calls holds the interpreter's lock. False where nothing has changed.
bool large_arenas();

// The same for what is larger, as the C library gives it to this thread: up to a gigabyte.
bool large_heap();

}  // namespace headrace
