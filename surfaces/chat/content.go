package chat

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/threads"
)

// wirePart is a part of a message's content, in either protocol. image_url is an object in chat completions and a text
// in responses.
type wirePart struct {
	Type    string          `json:"type"`
	Text    string          `json:"text"`
	Refusal string          `json:"refusal"`
	Image   json.RawMessage `json:"image_url"`
	FileID  string          `json:"file_id"`
	Detail  string          `json:"detail"`

	Data     string   `json:"file_data"`
	Filename string   `json:"filename"`
	File     filePart `json:"file"`
}

// messageContent is the decoded content of a message. problem is the first reason to refuse it.
type messageContent struct {
	words   string
	images  []threads.Image
	files   []filePart
	problem error
}

// decodeContent reads a message's content: a text, or parts of text, images and files. An error means that raw is
// neither; a part that cannot be used is the problem of the result.
func decodeContent(raw json.RawMessage) (c messageContent, err error) {
	if words, ok := text(raw); ok {
		return messageContent{words: words}, nil
	}
	var parts []wirePart
	if err := json.Unmarshal(raw, &parts); err != nil {
		return c, fmt.Errorf("decode content: %w", err)
	}
	var texts []string
	for _, p := range parts {
		var problem error
		switch p.Type {
		case "text", "input_text", "output_text", "refusal":
			texts = append(texts, p.Text+p.Refusal)
		case "file", "input_file":
			file := p.file()
			problem = file.check()
			c.files = append(c.files, file)
		case "image_url", "input_image":
			var image threads.Image
			if image, problem = p.image(); problem == nil {
				c.images = append(c.images, image)
			}
		default:
			problem = fmt.Errorf("only text, images and files are supported, not a part of type %.40q", p.Type)
		}
		c.problem = cmp.Or(c.problem, problem)
	}
	if len(c.images) > threads.MaxImages {
		c.problem = cmp.Or(c.problem, fmt.Errorf("a message has at most %d images", threads.MaxImages))
		c.images = c.images[:threads.MaxImages] // the history of a new thread takes a message despite its problem
	}
	c.words = strings.Join(texts, "\n")
	return c, nil
}

// filePart is the file of a content part: its member file in chat completions, the part itself in responses.
type filePart struct {
	FileID   string `json:"file_id"`
	Data     string `json:"file_data"` // base64, or a data: URL of base64
	Filename string `json:"filename"`
}

func (p wirePart) file() filePart {
	if p.Type == "file" {
		return p.File
	}
	return filePart{FileID: p.FileID, Data: p.Data, Filename: p.Filename}
}

// check returns why a part is refused.
func (p filePart) check() error {
	switch {
	case p.FileID == "" && p.Data == "":
		return errors.New("a file comes by its id, which POST /v1/files gives, or as file_data, with a filename")
	case p.FileID != "" && p.Data != "":
		return errors.New("a file has a file_id or file_data, not both")
	}
	return nil
}

// read decodes the file of a part. It refuses files above limit bytes.
func (p filePart) read(limit int64) (f File, err error) {
	if p.FileID != "" {
		return File{ID: p.FileID}, nil
	}
	f.Name = p.Filename
	f.ContentType, f.Content, err = decodeData(p.Data)
	switch {
	case err != nil:
		return f, badRequest("file", "invalid_file", "This file is not usable: %s.", err)
	case len(f.Content) == 0:
		return f, documents.ErrEmpty
	case int64(len(f.Content)) > limit:
		return f, documents.TooLarge(limit)
	}
	return f, nil
}

// decodeData decodes base64, or a data: URL of base64 with its media type. Line breaks in the base64 are ignored.
func decodeData(encoded string) (mediaType string, data []byte, err error) {
	if rest, isURL := strings.CutPrefix(encoded, "data:"); isURL {
		var isBase64 bool
		if mediaType, encoded, isBase64 = strings.Cut(rest, ";base64,"); !isBase64 {
			return "", nil, errors.New("a data: URL has the form data:TYPE;base64,…")
		}
	}
	if data, err = base64.StdEncoding.DecodeString(encoded); err != nil {
		return "", nil, errors.New("its data must be base64")
	}
	return mediaType, data, nil
}

// image reads an image of a request. Its errors are for the client.
func (p wirePart) image() (threads.Image, error) {
	if p.FileID != "" {
		return threads.Image{}, errors.New("an image is not read from a file_id: send its https URL, or the image as a " +
			"data: URL")
	}
	imageURL, ok := text(p.Image)
	if !ok {
		var inner struct {
			URL    string `json:"url"`
			Detail string `json:"detail"`
		}
		if json.Unmarshal(p.Image, &inner) != nil {
			return threads.Image{}, errors.New("image_url must be a URL, or an object with url")
		}
		imageURL, p.Detail = inner.URL, inner.Detail
	}
	if !slices.Contains([]string{"", "low", "high", "auto"}, p.Detail) {
		return threads.Image{}, errors.New("detail must be low, high or auto")
	}
	if strings.HasPrefix(imageURL, "data:") {
		return decodeImage(imageURL, p.Detail)
	}
	u, err := url.Parse(imageURL)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil:
		return threads.Image{}, errors.New("an image is an https URL, or a data: URL with the image in it")
	case len(imageURL) > threads.MaxImageURL || strings.ContainsFunc(imageURL, unprintable):
		return threads.Image{}, fmt.Errorf("an image's URL has at most %d printable characters", threads.MaxImageURL)
	}
	return threads.Image{URL: "https" + imageURL[len("https"):], Detail: p.Detail}, nil
}

func unprintable(r rune) bool { return r <= ' ' || r == 0x7f }

// decodeImage decodes the image of a data: URL. It checks the media type against the bytes.
func decodeImage(dataURL, detail string) (threads.Image, error) {
	kind, data, err := decodeData(dataURL)
	if err != nil {
		return threads.Image{}, err
	}
	mediaType := http.DetectContentType(data)
	switch {
	case len(data) > threads.MaxImageSize:
		return threads.Image{}, fmt.Errorf("an image has at most %d bytes", threads.MaxImageSize)
	case !slices.Contains(imageTypes(), mediaType):
		return threads.Image{}, errors.New("an image is png, jpeg, gif or webp, and this is none")
	case kind != mediaType && (kind != "image/jpg" || mediaType != "image/jpeg"):
		return threads.Image{}, fmt.Errorf("the data: URL says %s, and its data is %s", truncate(kind, 40), mediaType)
	}
	return threads.Image{MediaType: mediaType, Data: data, Detail: detail}, nil
}

// imageTypes are the media types of images that models take.
func imageTypes() []string { return []string{"image/png", "image/jpeg", "image/gif", "image/webp"} }
