package engineroom

import (
	"bytes"
	"hash/maphash"
	"slices"
	"sync"
)

const (
	// minDiffSize is the least size of a part, in bytes, of which a stream sends only the changed rows.
	minDiffSize = 32 << 10
	// maxRememberedParts bounds the states of parts whose rows rowHashes stores.
	maxRememberedParts = 16
)

// rowStart and rowEnd enclose a line of a waterfall; see spanNode.write.
var rowStart, rowEnd, rowID = []byte(`<div role="row" class="wf-row`), []byte("</div>\n"), []byte(` id="`)

// rowHashes has the recently sent rows of large parts, by the mark of the part.
type rowHashes struct {
	mu    sync.Mutex
	seed  maphash.Seed
	marks []string // the oldest first
	rows  map[string]map[string]uint64
}

// eachRow splits a part. It calls text for pieces without rows, and row for each row with its id.
func eachRow(html []byte, text func([]byte), row func(id string, whole []byte)) {
	for {
		at := bytes.Index(html, rowStart)
		if at < 0 {
			break
		}
		end := bytes.Index(html[at:], rowEnd)
		name := bytes.Index(html[at:], rowID)
		if end < 0 || name < 0 || name > end {
			break
		}
		text(html[:at])
		whole := html[at : at+end+len(rowEnd)]
		id, _, _ := bytes.Cut(whole[name+len(rowID):], []byte(`"`))
		row(string(id), whole)
		html = html[at+end+len(rowEnd):]
	}
	text(html)
}

// remember stores the rows of a part.
func (m *rowHashes) remember(mark string, html []byte) {
	if len(html) < minDiffSize {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.rows[mark] != nil {
		return
	}
	if m.rows == nil {
		m.rows, m.seed = map[string]map[string]uint64{}, maphash.MakeSeed()
	}
	if len(m.marks) == maxRememberedParts {
		delete(m.rows, m.marks[0])
		m.marks = slices.Delete(m.marks, 0, 1)
	}
	rows := map[string]uint64{}
	eachRow(html, func([]byte) {}, func(id string, whole []byte) { rows[id] = maphash.Bytes(m.seed, whole) })
	m.rows[mark], m.marks = rows, append(m.marks, mark)
}

// diff returns a part in which unchanged rows since a mark are empty, with the attribute data-same. It returns nil
// for an unknown mark.
func (m *rowHashes) diff(mark string, html []byte) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.rows[mark]
	if len(before) == 0 || len(html) < minDiffSize {
		return nil
	}
	var b bytes.Buffer
	eachRow(html, func(text []byte) { b.Write(text) }, func(id string, whole []byte) {
		if before[id] != maphash.Bytes(m.seed, whole) {
			b.Write(whole)
			return
		}
		b.WriteString(`<div role="row" id="` + id + `" data-same></div>` + "\n")
	})
	return b.Bytes()
}
